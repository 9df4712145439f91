//! The values that lines of a log may have. A line that is JSON of the right form can still hold
//! numbers that no router writes; a replay would divide by them or overflow.

use crate::format::{Fleet, Record};

/// Tokens of a block, at most: more than any engine has.
const MOST_BLOCK_TOKENS: u32 = 65_536;
/// Tokens of a prompt or an answer, at most.
const MOST_TOKENS: u32 = 100_000_000;
/// The latest time since the log began, in seconds: 31 years.
const LATEST_S: f64 = 1e9;
/// The largest coefficient of a step's time, in the unit of its name.
const LARGEST_RATE: f64 = 1e9;

/// A value that is out of its range. The text names the value and the range.
pub(crate) type OutOfRange = String;

/// Checks the workers that take requests, and the rates of all classes.
pub(crate) fn check_fleet(fleet: &Fleet) -> Result<(), OutOfRange> {
    within("the time t", fleet.t, LATEST_S)?;
    for worker in fleet.workers.iter().filter(|worker| worker.ready) {
        let size = worker.block_size_tokens;
        if !(1..=MOST_BLOCK_TOKENS).contains(&size) {
            return Err(format!(
                "block_size_tokens of worker {} is {size}, but it must be from 1 to \
                 {MOST_BLOCK_TOKENS}",
                worker.id
            ));
        }
    }
    for class in &fleet.classes {
        for (name, rate) in [
            ("step_ms", class.step_ms),
            ("sequence_us", class.sequence_us),
            ("kv_token_ns", class.kv_token_ns),
            ("prompt_step_ms", class.prompt_step_ms),
            ("prompt_token_us", class.prompt_token_us),
            ("prompt_square_ns", class.prompt_square_ns),
        ] {
            within(&format!("{name} of {:?}", class.device), rate, LARGEST_RATE)?;
        }
    }
    Ok(())
}

/// Checks what a replay sends of a request.
pub(crate) fn check_record(record: &Record) -> Result<(), OutOfRange> {
    within("the time t", record.arrived_s, LATEST_S)?;
    for (name, tokens) in [
        ("the prompt length i", record.prompt_tokens),
        ("the output length o", record.output_tokens),
    ] {
        if tokens > MOST_TOKENS {
            return Err(format!(
                "{name} is {tokens} tokens, but it must be {MOST_TOKENS} or less"
            ));
        }
    }
    if let Some((0, _)) = record.shares {
        return Err(
            "s says that the prompt begins like that of 0 records before, which is its own, but it \
             must name 1 or more before"
                .to_owned(),
        );
    }
    Ok(())
}

fn within(name: &str, value: f64, most: f64) -> Result<(), OutOfRange> {
    if (0.0..=most).contains(&value) {
        return Ok(());
    }
    Err(format!(
        "{name} is {value:?}, but it must be from 0 to {most:e}"
    ))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::reader::{Log, ReadError};

    const HEADER: &str = r#"{"tasuki_request_log":1,"tasuki":"1","began_unix_s":0.0,"router":{"policy":"cost","strict_roles":false,"role_preference":0.05,"admission":true}}"#;
    const FLEET: &str = r#"{"fleet":{"t":0.0,"workers":[{"id":4,"role":"mixed","ready":true,"machine":1,"class":0,"num_blocks":100,"block_size_tokens":16,"max_model_len_tokens":512,"reports_cache":true}],"classes":[{"device":"cpu","tensor_parallel":1,"step_ms":5.0,"sequence_us":20.0,"kv_token_ns":45.0,"prompt_step_ms":5.5,"prompt_token_us":22.0,"prompt_square_ns":0.3}]}}"#;
    const RECORD: &str = r#"{"t":1.5,"i":300,"o":7,"f":12.0,"e":45.7}"#;

    fn read(lines: &[&str]) -> Result<Log, ReadError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requests.log");
        fs::write(&path, lines.join("\n") + "\n").unwrap();
        Log::read(&path)
    }

    /// The error of a log in whose fleet or record `from` is `to`.
    fn refused(from: &str, to: &str) -> String {
        assert!(FLEET.contains(from) != RECORD.contains(from), "{from}");
        let (fleet, record) = (FLEET.replace(from, to), RECORD.replace(from, to));
        let error = read(&[HEADER, &fleet, RECORD, &record]).unwrap_err();
        assert!(matches!(error, ReadError::Value { .. }), "{error}");
        error.to_string()
    }

    #[test]
    fn values_that_no_router_writes_are_refused_with_their_line() {
        assert_eq!(read(&[HEADER, FLEET, RECORD]).unwrap().requests.len(), 1);
        for (from, to, said) in [
            (
                "\"block_size_tokens\":16",
                "\"block_size_tokens\":0",
                "line 2: block_size_tokens of worker 4 is 0, but it must be from 1 to 65536",
            ),
            (
                "\"block_size_tokens\":16",
                "\"block_size_tokens\":4294967295",
                "block_size_tokens of worker 4 is 4294967295",
            ),
            (
                "\"step_ms\":5.0",
                "\"step_ms\":-5.0",
                "step_ms of \"cpu\" is -5.0",
            ),
            ("\"t\":0.0", "\"t\":1e300", "line 2: the time t is 1e300"),
            (
                "\"t\":1.5",
                "\"t\":1e23",
                "line 4: the time t is 1e23, but it must be from 0 to 1e9",
            ),
            ("\"t\":1.5", "\"t\":-1.5", "line 4: the time t is -1.5"),
            (
                "\"i\":300",
                "\"i\":4294967295",
                "the prompt length i is 4294967295 tokens",
            ),
            (
                "\"o\":7",
                "\"o\":4294967295",
                "the output length o is 4294967295 tokens",
            ),
            (
                "\"o\":7",
                "\"o\":7,\"s\":[0,128]",
                "line 4: s says that the prompt begins like that of 0 records before",
            ),
        ] {
            let error = refused(from, to);
            assert!(
                error.contains(said) && error.contains("correct the value"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_line_that_is_replaced_as_the_error_says_is_skipped() {
        let log = read(&[HEADER, FLEET, RECORD, "{}"]).unwrap();
        assert_eq!((log.requests.len(), log.skipped), (1, 1));
    }

    #[test]
    fn a_worker_that_takes_no_requests_is_not_checked() {
        let unready = FLEET
            .replace("\"ready\":true", "\"ready\":false")
            .replace("\"block_size_tokens\":16", "\"block_size_tokens\":0");
        assert!(read(&[HEADER, &unready, FLEET, RECORD]).is_ok());
    }

    #[test]
    fn a_record_shares_no_more_than_its_own_prompt() {
        let shares = r#"{"t":2.0,"i":300,"o":7,"s":[1,4294967295],"e":45.7}"#;
        let log = read(&[HEADER, FLEET, RECORD, shares]).unwrap();
        assert_eq!(log.requests[1].chunks.len(), 2);
        assert_eq!(log.requests[0].chunks, log.requests[1].chunks);
    }
}
