//! The only place of the HTTP side that reads the wall clock.

use chrono::{Local, NaiveDateTime};

/// Seconds since 1970, as responses carry them.
pub fn unix_seconds() -> u64 {
    u64::try_from(Local::now().timestamp()).unwrap_or(0)
}

/// Local time, for templates that print the date.
pub fn local_now() -> NaiveDateTime {
    Local::now().naive_local()
}
