use std::path::Path;

use super::{Trace, TraceFormat, TraceSettings};
use crate::error::PlanError;
use crate::plan::{Planned, Workload};
use crate::workload::testing::{all, file, ids, making, shared};

const MOONCAKE: &str = r#"{"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [7, 8, 9]}
{"timestamp": 1500, "input_length": 24, "output_length": 0, "hash_ids": [7, 8, 10]}

{"timestamp": 4000, "input_length": 9, "output_length": 3, "hash_ids": [7, 9]}
{"timestamp": 9000, "input_length": 6, "output_length": 50}
"#;

const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
    2023-11-16 18:17:03.9799600,374,44\n\
    2023-11-16 18:17:04.0319600,396,109\n\
    2023-11-16 18:17:04.0000000,0,55\n";

fn settings(path: &Path, format: TraceFormat) -> TraceSettings {
    TraceSettings {
        file: path.to_owned(),
        format,
        block_tokens: 8,
        speed_up: 1.0,
        from_s: 0.0,
        until_s: None,
        max_input_tokens: None,
        max_output_tokens: None,
    }
}

/// The requests of a trace, with the settings changed.
fn replay(content: &str, format: TraceFormat, change: impl Fn(&mut TraceSettings)) -> Vec<Planned> {
    try_replay(content, format, change).unwrap()
}

fn try_replay(
    content: &str,
    format: TraceFormat,
    change: impl Fn(&mut TraceSettings),
) -> Result<Vec<Planned>, PlanError> {
    let file = file(content);
    let mut settings = settings(file.path(), format);
    change(&mut settings);
    let mut trace = Trace::read(making(0, 3), &settings, None)?;
    let total = trace.total();
    let planned = all(&mut trace);
    assert_eq!(total, Some(planned.len()));
    Ok(planned)
}

fn at_ms(planned: &[Planned]) -> Vec<u128> {
    planned.iter().map(|p| p.at.unwrap().as_millis()).collect()
}

fn lengths(planned: &[Planned]) -> Vec<(usize, u32)> {
    planned
        .iter()
        .map(|p| (ids(p).len(), p.output_tokens))
        .collect()
}

#[test]
fn equal_hashes_are_equal_tokens() {
    let planned = replay(MOONCAKE, TraceFormat::Mooncake, |_| {});
    assert_eq!(at_ms(&planned), [0, 1_500, 4_000, 9_000]);
    // An answer has at least one token.
    assert_eq!(lengths(&planned), [(20, 5), (24, 1), (9, 3), (6, 50)]);
    assert!((16..20).contains(&shared(&planned[0], &planned[1])));
    // The second block of the third is the third of the first, cut short.
    assert_eq!(ids(&planned[2])[..8], ids(&planned[0])[..8]);
    assert_eq!(ids(&planned[2])[8..], ids(&planned[0])[16..17]);
    assert!(shared(&planned[0], &planned[3]) < 6);
}

#[test]
fn a_window_is_replayed_faster_and_cut() {
    let planned = replay(MOONCAKE, TraceFormat::Mooncake, |settings| {
        settings.speed_up = 2.0;
        settings.from_s = 1.0;
        settings.until_s = Some(9.0);
        settings.max_input_tokens = Some(18);
        settings.max_output_tokens = Some(2);
    });
    assert_eq!(at_ms(&planned), [250, 1_500]);
    assert_eq!(lengths(&planned), [(18, 1), (9, 2)]);
    let whole = replay(MOONCAKE, TraceFormat::Mooncake, |_| {});
    assert_eq!(ids(&planned[0]), &ids(&whole[1])[..18]);
    let error = try_replay(MOONCAKE, TraceFormat::Mooncake, |s| s.from_s = 10.0).unwrap_err();
    assert!(error.to_string().contains("--trace-from-s"), "{error}");
}

#[test]
fn azure_rows_are_sorted_and_share_nothing() {
    let planned = replay(AZURE, TraceFormat::Azure, |_| {});
    assert_eq!(at_ms(&planned), [0, 20, 52]);
    assert_eq!(lengths(&planned), [(374, 44), (1, 55), (396, 109)]);
    assert!(shared(&planned[0], &planned[2]) < 8);
    let offset = AZURE
        .replace("9799600,", "979960+00:00,")
        .replace("0000,", "000+01:00,");
    let planned = replay(&offset, TraceFormat::Azure, |_| {});
    assert_eq!(at_ms(&planned).len(), 3);
    assert_eq!(at_ms(&planned)[2] - at_ms(&planned)[1], 52);
}

#[test]
fn the_number_of_requests_can_be_limited() {
    let file = file(MOONCAKE);
    let settings = settings(file.path(), TraceFormat::Mooncake);
    let mut trace = Trace::read(making(0, 3), &settings, Some(2)).unwrap();
    assert_eq!(all(&mut trace).len(), 2);
}

#[test]
fn broken_files_are_named_with_their_line() {
    let message = |content: &str, format| {
        let error = try_replay(content, format, |_| {}).unwrap_err();
        error.to_string()
    };
    use TraceFormat::{Azure, Mooncake};
    let blocks = r#"{"timestamp": 0, "input_length": 20, "output_length": 5, "hash_ids": [7, 8]}"#;
    let said = message(blocks, Mooncake);
    assert!(
        said.contains("line 1: 2 hash_ids") && said.contains("--trace-block-tokens"),
        "{said}"
    );
    let said = message(&format!("{MOONCAKE}\n{{\"timestamp\": 1}}"), Mooncake);
    assert!(
        said.contains("line 7") && said.contains("input_length"),
        "{said}"
    );
    let said = message(&format!("{MOONCAKE}\n{{\"timest"), Mooncake);
    assert!(
        said.contains(", line 7: EOF while parsing a string at column 8; a line is a JSON object"),
        "{said}"
    );
    let said = message("TIMESTAMP,ContextTokens\nx,1\n", Azure);
    assert!(
        said.contains("line 2") && said.contains("GeneratedTokens"),
        "{said}"
    );
    let said = message("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", Azure);
    assert!(
        said.contains("line 2") && said.contains("\"noon\""),
        "{said}"
    );
    let missing = settings(Path::new("/no/such/trace.csv"), Azure);
    let error = Trace::read(making(0, 3), &missing, None).unwrap_err();
    assert!(error.to_string().contains("/no/such/trace.csv"), "{error}");
}

#[test]
fn a_csv_whose_head_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.csv");
    std::fs::write(&file, b"TIMESTAMP,\xff\n").unwrap();
    for (path, says) in [(folder.path(), "Is a directory"), (&file, "invalid utf-8")] {
        let settings = settings(path, TraceFormat::Azure);
        let error = Trace::read(making(0, 3), &settings, None).unwrap_err();
        let said = error.to_string();
        assert!(
            said.contains(&path.display().to_string()) && said.contains(says),
            "{said}"
        );
    }
}

#[test]
fn times_and_lengths_that_no_request_has_are_refused_with_their_line() {
    let first = r#"{"timestamp": 0, "input_length": 20, "output_length": 5}"#;
    let mooncake = |second: &str| {
        let content = format!("{first}\n{second}\n");
        let error = try_replay(&content, TraceFormat::Mooncake, |s| s.speed_up = 1e-3).unwrap_err();
        error.to_string()
    };
    for given in ["1e23", "-1.0", "1e300", "-1e23"] {
        let line = format!(r#"{{"timestamp": {given}, "input_length": 20, "output_length": 5}}"#);
        let said = mooncake(&line);
        let value = given.parse::<f64>().unwrap();
        assert!(
            said.contains("line 2") && said.contains(&format!("timestamp is {value:?}")),
            "{said}"
        );
        assert!(
            said.contains("0 to 1e13 ms") && said.contains("milliseconds"),
            "{said}"
        );
    }
    // JSON has no such numbers.
    for given in ["NaN", "1e999"] {
        let line = format!(r#"{{"timestamp": {given}, "input_length": 20, "output_length": 5}}"#);
        assert!(mooncake(&line).contains("line 2"), "{given}");
    }
    for (input, output, name) in [
        (u32::MAX, 5, "input_length"),
        (5, u32::MAX, "output_length"),
    ] {
        let line =
            format!(r#"{{"timestamp": 1, "input_length": {input}, "output_length": {output}}}"#);
        let said = mooncake(&line);
        let expected = format!("line 2: {name} is 4294967295, but a request may have 10000000");
        assert!(said.contains(&expected), "{said}");
    }
    let azure = |row: &str| {
        let content = format!("{AZURE}{row}\n");
        let error = try_replay(&content, TraceFormat::Azure, |_| {}).unwrap_err();
        error.to_string()
    };
    let said = azure("+262142-01-01 00:00:00.0,374,44");
    assert!(
        said.contains("line 5: TIMESTAMP is \"+262142-") && said.contains("1970 to 2286"),
        "{said}"
    );
    let said = azure("0001-01-01 00:00:00.0,374,44");
    assert!(said.contains("line 5: TIMESTAMP is \"0001-"), "{said}");
    let said = azure("2023-11-16 18:17:04.0,374,4294967295");
    assert!(
        said.contains("line 5: GeneratedTokens is 4294967295"),
        "{said}"
    );
}

#[test]
fn the_latest_time_is_replayed_at_the_lowest_speed() {
    let content = r#"{"timestamp": 0, "input_length": 20, "output_length": 5}
        {"timestamp": 1e13, "input_length": 20, "output_length": 5}"#;
    let planned = replay(content, TraceFormat::Mooncake, |s| s.speed_up = 1e-3);
    assert_eq!(at_ms(&planned), [0, 10_000_000_000_000_000]);
}

#[test]
fn a_file_without_a_request_is_refused_by_name() {
    for (content, format) in [
        ("", TraceFormat::Mooncake),
        ("", TraceFormat::Azure),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n",
            TraceFormat::Azure,
        ),
    ] {
        let said = try_replay(content, format, |_| {}).unwrap_err().to_string();
        assert!(said.contains("no request at all"), "{said}");
    }
}
