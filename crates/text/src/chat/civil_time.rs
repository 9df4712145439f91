//! A point in time as a calendar shows it, and `strftime` for it.

use std::fmt::Write;

/// Local date and time without a zone, as Python's `datetime.now()` gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CivilTime {
    pub year: i32,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
    pub microsecond: u32,
}

const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAY_S: i64 = 86_400;

impl CivilTime {
    /// The time `unix_s` seconds after 1970-01-01T00:00Z on a clock that is
    /// `utc_offset_s` ahead of UTC.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub fn from_unix(unix_s: i64, utc_offset_s: i32) -> Self {
        let local_s = unix_s.saturating_add(i64::from(utc_offset_s));
        // Years from March on, in eras of 400 years.
        // Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms".
        let days = local_s.div_euclid(DAY_S) + 719_468;
        let era = days.div_euclid(146_097);
        let day_of_era = days.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let month = if shifted_month < 10 {
            shifted_month + 3
        } else {
            shifted_month - 9
        };
        let second = local_s.rem_euclid(DAY_S) as u32;
        Self {
            year: (year_of_era + era * 400 + i64::from(month <= 2)) as i32,
            month: month as u32,
            day: (day_of_year - (153 * shifted_month + 2) / 5 + 1) as u32,
            hour: second / 3600,
            minute: second / 60 % 60,
            second: second % 60,
            microsecond: 0,
        }
    }

    /// As Python's `strftime` under glibc in the C locale. Unknown directives
    /// are kept as they are.
    #[must_use]
    pub fn strftime(&self, format: &str) -> String {
        let mut out = String::new();
        let mut chars = format.chars().peekable();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = String::from("%");
            let mut flag = None;
            while let Some(&next) = chars.peek()
                && matches!(next, '-' | '_' | '0' | '^' | '#')
            {
                flag = Some(next);
                directive.push(next);
                chars.next();
            }
            let letter = chars.next();
            directive.extend(letter);
            match letter.and_then(|letter| self.field(letter)) {
                Some(field) => field.write(&mut out, flag),
                None => out.push_str(&directive),
            }
        }
        out
    }

    #[allow(clippy::cast_possible_wrap)]
    fn field(&self, letter: char) -> Option<Field> {
        let number = |value: u32, width| Some(Field::Number(i64::from(value), width, '0'));
        let spaced = |value: u32| Some(Field::Number(i64::from(value), 2, ' '));
        let composed = |format: &str| Some(Field::Text(self.strftime(format)));
        let hour12 = if self.hour.is_multiple_of(12) {
            12
        } else {
            self.hour % 12
        };
        let weekday = self.weekday();
        let day_of_year = self.day_of_year();
        match letter {
            'a' => Some(Field::Text(WEEKDAYS[weekday as usize][..3].to_owned())),
            'A' => Some(Field::Text(WEEKDAYS[weekday as usize].to_owned())),
            'b' | 'h' => Some(Field::Text(self.month_name()[..3].to_owned())),
            'B' => Some(Field::Text(self.month_name().to_owned())),
            'c' => composed("%a %b %e %H:%M:%S %Y"),
            'C' => Some(Field::Number(i64::from(self.year.div_euclid(100)), 2, '0')),
            'd' => number(self.day, 2),
            'D' | 'x' => composed("%m/%d/%y"),
            'e' => spaced(self.day),
            'f' => number(self.microsecond, 6),
            'F' => composed("%Y-%m-%d"),
            'g' => Some(Field::Number(
                i64::from(self.iso_week().0.rem_euclid(100)),
                2,
                '0',
            )),
            'G' => Some(Field::Number(i64::from(self.iso_week().0), 4, '0')),
            'H' => number(self.hour, 2),
            'I' => number(hour12, 2),
            'j' => number(day_of_year, 3),
            'k' => spaced(self.hour),
            'l' => spaced(hour12),
            'm' => number(self.month, 2),
            'M' => number(self.minute, 2),
            'n' => Some(Field::Text("\n".to_owned())),
            'p' => Some(Field::Text(
                if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            )),
            'P' => Some(Field::Text(
                if self.hour < 12 { "am" } else { "pm" }.to_owned(),
            )),
            'r' => composed("%I:%M:%S %p"),
            'R' => composed("%H:%M"),
            'S' => number(self.second, 2),
            't' => Some(Field::Text("\t".to_owned())),
            'T' | 'X' => composed("%H:%M:%S"),
            'u' => number(if weekday == 0 { 7 } else { weekday }, 1),
            'U' => number((day_of_year + 6 - weekday) / 7, 2),
            'V' => number(self.iso_week().1, 2),
            'w' => number(weekday, 1),
            'W' => number((day_of_year + 6 - (weekday + 6) % 7) / 7, 2),
            'y' => Some(Field::Number(i64::from(self.year.rem_euclid(100)), 2, '0')),
            'Y' => Some(Field::Number(i64::from(self.year), 4, '0')),
            // A time without a zone has no name and no offset.
            'z' | 'Z' => Some(Field::Text(String::new())),
            '%' => Some(Field::Text("%".to_owned())),
            _ => None,
        }
    }

    fn month_name(&self) -> &'static str {
        MONTHS[(self.month.clamp(1, 12) - 1) as usize]
    }

    /// 1 to 366.
    fn day_of_year(&self) -> u32 {
        const BEFORE: [u32; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
        let leap_day = u32::from(self.month > 2 && is_leap(self.year));
        BEFORE[(self.month.clamp(1, 12) - 1) as usize] + leap_day + self.day
    }

    /// 0 is Sunday.
    fn weekday(&self) -> u32 {
        let year = i64::from(self.year) - 1;
        let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
        let days = year * 365 + leap_days + i64::from(self.day_of_year());
        days.rem_euclid(7).try_into().unwrap_or(0)
    }

    /// ISO 8601 year and week.
    fn iso_week(&self) -> (i32, u32) {
        let monday_based = (self.weekday() + 6) % 7;
        let week = (self.day_of_year() + 9 - monday_based) / 7;
        let weeks_in = |year: i32| {
            let last = Self {
                year,
                month: 12,
                day: 31,
                ..*self
            };
            let long = last.weekday() == 4 || (last.weekday() == 5 && is_leap(year));
            if long { 53 } else { 52 }
        };
        match week {
            0 => (self.year - 1, weeks_in(self.year - 1)),
            53 if weeks_in(self.year) == 52 => (self.year + 1, 1),
            week => (self.year, week),
        }
    }
}

fn is_leap(year: i32) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

enum Field {
    Text(String),
    /// Value, width, padding.
    Number(i64, usize, char),
}

impl Field {
    /// `flag` is glibc's: `-` no padding, `_` spaces, `0` zeros, `^` upper case.
    fn write(self, out: &mut String, flag: Option<char>) {
        match self {
            Self::Text(text) if flag == Some('^') => out.push_str(&text.to_uppercase()),
            Self::Text(text) => out.push_str(&text),
            Self::Number(value, width, padding) => {
                let padding = match flag {
                    Some('_') => ' ',
                    Some('0') => '0',
                    _ => padding,
                };
                let _ = match (flag, padding) {
                    (Some('-'), _) => write!(out, "{value}"),
                    (_, '0') => write!(out, "{value:0width$}"),
                    _ => write!(out, "{value:width$}"),
                };
            }
        }
    }
}

#[cfg(test)]
mod unit_tests {
    use super::CivilTime;

    #[test]
    fn from_unix_follows_the_calendar() {
        let date =
            |unix_s, offset_s| CivilTime::from_unix(unix_s, offset_s).strftime("%F %T %A %j");
        assert_eq!(date(0, 0), "1970-01-01 00:00:00 Thursday 001");
        assert_eq!(date(951_782_399, 0), "2000-02-28 23:59:59 Monday 059");
        assert_eq!(date(951_782_400, 0), "2000-02-29 00:00:00 Tuesday 060");
        assert_eq!(
            date(1_735_689_599, 3600),
            "2025-01-01 00:59:59 Wednesday 001"
        );
        assert_eq!(date(-1, 0), "1969-12-31 23:59:59 Wednesday 365");
    }

    #[test]
    fn unknown_directives_stay() {
        let time = CivilTime::from_unix(0, 0);
        assert_eq!(time.strftime("%Q 100% %-d %_m %^a"), "%Q 100% 1  1 THU");
    }
}
