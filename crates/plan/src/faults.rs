//! `--fault`: what happens to workers and links.

use tasuki_sim::{Fault, FaultKind, Time};

use crate::error::SimulateError;

/// Reads one; `workers`: how many there are.
///
/// # Errors
///
/// It is not understood, or names a worker that is not there.
pub fn parse(given: &str, workers: u32) -> Result<Fault, SimulateError> {
    let fail = |reason: &str| SimulateError::Fault {
        given: given.to_owned(),
        reason: reason.to_owned(),
    };
    let (what, rest) = given
        .split_once('@')
        .ok_or_else(|| fail("write WHAT:WORKER@SECONDS, such as crash:0@30+20"))?;
    let (kind, worker) = what.split_once(':').unwrap_or((what, "0"));
    let worker: u32 = worker
        .parse()
        .map_err(|_| fail("the worker is not a number"))?;
    if worker >= workers {
        return Err(fail(&format!(
            "there are {workers} workers, counted from 0"
        )));
    }
    let (at, more) = match rest.find(['+', '=']) {
        Some(end) => (&rest[..end], Some(&rest[end + 1..])),
        None => (rest, None),
    };
    let number = |text: &str| {
        let number = text.parse::<f64>().ok();
        number.filter(|n| n.is_finite() && *n >= 0.0)
    };
    let at_s = number(at).ok_or_else(|| fail("the time is not a number of seconds"))?;
    let more = match more {
        None => None,
        Some(text) => Some(number(text).ok_or_else(|| fail("the last number is not understood"))?),
    };
    let factor = || {
        more.filter(|factor| *factor > 0.0)
            .ok_or_else(|| fail("it needs =FACTOR"))
    };
    let kind = match kind {
        "crash" => FaultKind::Crash {
            back_after_s: more.unwrap_or(20.0),
        },
        "slow" => FaultKind::Slow { factor: factor()? },
        "links" => FaultKind::Links { factor: factor()? },
        "drain" => FaultKind::Drain,
        "undrain" => FaultKind::Undrain,
        _ => return Err(fail("known are crash, slow, links, drain and undrain")),
    };
    Ok(Fault {
        at: Time::from_s(at_s),
        worker,
        kind,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_and_what_is_wrong_is_said() {
        let crash = parse("crash:1@30+5", 2).unwrap();
        assert_eq!((crash.worker, crash.at), (1, Time::from_s(30.0)));
        assert_eq!(crash.kind, FaultKind::Crash { back_after_s: 5.0 });
        let slow = parse("slow:0@1=2.5", 1).unwrap();
        assert_eq!(slow.kind, FaultKind::Slow { factor: 2.5 });
        assert_eq!(
            parse("links@4=0.1", 1).unwrap().kind,
            FaultKind::Links { factor: 0.1 }
        );
        for (given, said) in [
            ("crash:2@1", "there are 2 workers"),
            ("slow:0@1", "=FACTOR"),
            ("melt:0@1", "known are"),
            ("crash:0", "WHAT:WORKER@SECONDS"),
        ] {
            let error = parse(given, 2).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
