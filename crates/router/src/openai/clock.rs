//! The only place of the HTTP side that reads the wall clock.

use chrono::{Datelike, Local, Timelike};
use tasuki_text::CivilTime;

/// Seconds since 1970, as responses carry them.
pub fn unix_seconds() -> u64 {
    u64::try_from(Local::now().timestamp()).unwrap_or(0)
}

/// Local time, for templates that print the date.
pub fn civil_now() -> CivilTime {
    let now = Local::now();
    CivilTime {
        year: now.year(),
        month: now.month(),
        day: now.day(),
        hour: now.hour(),
        minute: now.minute(),
        second: now.second(),
        microsecond: now.nanosecond() / 1000 % 1_000_000,
    }
}
