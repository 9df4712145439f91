//! `--fault`: what happens to workers and links.

use tasuki_sim::{Fault, FaultKind, Time};

use crate::error::SimulateError;

/// Of a step's time, or of a link's bandwidth.
const FACTORS: std::ops::RangeInclusive<f64> = 1e-6..=1e6;

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
    let (kind, worker) = match what.split_once(':') {
        Some((kind, worker)) => (kind, Some(worker)),
        None => (what, None),
    };
    let worker = match (kind, worker) {
        ("links", None) => 0,
        ("links", Some(_)) => {
            return Err(fail("it names no worker: links@SECONDS=FACTOR is of all"));
        }
        (_, None) => return Err(fail("it names a worker, such as crash:0@30")),
        (_, Some(worker)) => worker
            .parse()
            .map_err(|_| fail("the worker is not a number"))?,
    };
    if worker >= workers {
        return Err(fail(&format!(
            "there are {workers} workers, counted from 0"
        )));
    }
    let (at, more) = rest.split_at(rest.find(['+', '=']).unwrap_or(rest.len()));
    let number = |text: &str| {
        let number = text.parse::<f64>().ok();
        number.filter(|n| n.is_finite() && *n >= 0.0)
    };
    let at_s = number(at).ok_or_else(|| fail("the time is not a number of seconds"))?;
    let factor = || {
        let factor = more.strip_prefix('=').and_then(number);
        let factor = factor.ok_or_else(|| fail("it needs =FACTOR"))?;
        match FACTORS.contains(&factor) {
            true => Ok(factor),
            false => Err(fail("FACTOR must be from 0.000001 to 1000000")),
        }
    };
    let kind = match kind {
        "crash" if more.is_empty() => FaultKind::Crash { back_after_s: 20.0 },
        "crash" => FaultKind::Crash {
            back_after_s: more
                .strip_prefix('+')
                .and_then(number)
                .ok_or_else(|| fail("after the time comes +SECONDS until it is back"))?,
        },
        "slow" => FaultKind::Slow { factor: factor()? },
        "links" => FaultKind::Links { factor: factor()? },
        "drain" | "undrain" if !more.is_empty() => {
            return Err(fail(
                "it takes no number after the time: drain:0@5 and undrain:0@50 are two faults",
            ));
        }
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
            // Nothing of it is ignored.
            ("drain:0@5+10", "takes no number"),
            ("undrain:0@5=1", "takes no number"),
            ("links:1@4=0.5", "names no worker"),
            ("slow@4=2", "names a worker"),
            ("slow:0@4+20", "=FACTOR"),
            ("crash:0@4=20", "+SECONDS"),
            // Beyond these, times have no end.
            ("slow:0@1=1e30", "from 0.000001 to 1000000"),
            ("links@1=1e-30", "from 0.000001 to 1000000"),
        ] {
            let error = parse(given, 2).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
