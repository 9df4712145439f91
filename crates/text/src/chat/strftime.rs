//! Python's `strftime` as glibc gives it in the C locale, on chrono's.

use std::fmt::Write;

use chrono::NaiveDateTime;

/// Directives for numbers: these take a flag for their padding.
const NUMBERS: &str = "CdegGHIjklmMSuUVwWyY";
const TEXTS: &str = "aAbBhcDFnpPrRtTxX%";

/// `now` as `format` says. Directives that glibc does not know stay as they are, and so
/// do those of chrono's own.
pub(super) fn strftime(now: NaiveDateTime, format: &str) -> String {
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = directive(&mut out, now, rest);
        rest = &rest[length..];
    }
    out + rest
}

/// Writes what the directive at the beginning of `text` stands for; its length. The last of
/// several flags counts: `-` no padding, `_` spaces, `0` zeros, `^` upper case, `#` the other case.
fn directive(out: &mut String, now: NaiveDateTime, text: &str) -> usize {
    let letters = text[1..].trim_start_matches(['-', '_', '0', '^', '#']);
    let flag = &text[1..text.len() - letters.len()];
    let flag = flag.chars().next_back();
    let Some(letter) = letters.chars().next() else {
        out.push_str(text);
        return text.len();
    };
    let length = text.len() - letters.len() + letter.len_utf8();
    let written = out.len();
    let _ = match (letter, flag) {
        // Of a time without a zone.
        ('z' | 'Z', _) => Ok(()),
        ('f', _) => write!(out, "{}", now.format("%6f")),
        (_, Some(padding @ ('-' | '_' | '0'))) if NUMBERS.contains(letter) => {
            write!(out, "{}", now.format(&format!("%{padding}{letter}")))
        }
        _ if NUMBERS.contains(letter) || TEXTS.contains(letter) => {
            write!(out, "{}", now.format(&format!("%{letter}")))
        }
        _ => out.write_str(&text[..length]),
    };
    if TEXTS.contains(letter) {
        match flag {
            Some('#') if letter == 'p' => out[written..].make_ascii_lowercase(),
            Some('^' | '#') => out[written..].make_ascii_uppercase(),
            _ => {}
        }
    }
    length
}

#[cfg(test)]
mod unit_tests {
    use chrono::DateTime;

    use super::strftime;

    fn at(unix_s: i64, format: &str) -> String {
        let time = DateTime::from_timestamp(unix_s, 0).expect("in range");
        strftime(time.naive_utc(), format)
    }

    /// Outputs of CPython 3.11 with glibc 2.36.
    #[test]
    fn directives_are_those_of_python() {
        let directives = "%a %A %b %B %c %C %d %D %e %F %g %G %h %H %I %j %k %l %m %M %p %P %r %R \
             %S %T %u %U %V %w %W %x %X %y %Y %z%Z%%";
        let of_python = "Tue Tuesday Feb February Tue Feb 29 00:00:00 2000 20 29 02/29/00 29 \
             2000-02-29 00 2000 Feb 00 12 060  0 12 02 00 AM am \
             12:00:00 AM 00:00 00 00:00:00 2 09 09 2 09 02/29/00 00:00:00 00 2000 %";
        assert_eq!(at(951_782_400, directives), of_python);
    }

    #[test]
    fn flags_are_those_of_glibc() {
        let flags = "%-d %_m %^a %-j %_H %0e %-e %-I %_S %^B %-y %#d %-_d %-p %#p %#a %^c";
        assert_eq!(
            at(0, flags),
            "1  1 THU 1  0 01 1 12  0 JANUARY 70 01  1 AM am THU THU JAN  1 00:00:00 1970"
        );
    }

    #[test]
    fn unknown_directives_stay() {
        assert_eq!(at(0, "%Q 100% %+ %v %.3f %-"), "%Q 100% %+ %v %.3f %-");
        assert_eq!(at(0, "%é%"), "%é%");
    }
}
