use std::path::Path;

use clap::Parser;
use serde_json::{Value, json};

use super::{ArrivalArgs, WorkloadArgs};
use crate::arrivals::{Arrival, Process};
use crate::plan::{Api, Planned, Prompt};

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    arrival: ArrivalArgs,
}

fn parse(words: &str) -> Result<Line, String> {
    let words = std::iter::once("bench").chain(words.split_whitespace());
    Line::try_parse_from(words).map_err(|error| error.to_string())
}

fn described(words: &str) -> Result<Value, String> {
    let plan = parse(words)?.workload.plan(Api::Completions);
    plan.map(|plan| plan.describe())
        .map_err(|error| error.to_string())
}

fn first(words: &str, api: Api) -> Result<Planned, String> {
    let plan = parse(words)?
        .workload
        .plan(api)
        .map_err(|error| error.to_string())?;
    let mut workload = plan.build().map_err(|error| error.to_string())?;
    Ok(workload.next().expect("a request"))
}

fn arrival(words: &str, has_times: bool) -> Result<Arrival, String> {
    let args = parse(words)?.arrival;
    args.arrival(has_times).map_err(|error| error.to_string())
}

fn model() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/text/models/byte_level");
    path.to_str().expect("a path").to_owned()
}

#[test]
fn a_workload_describes_all_its_parameters() {
    let random = json!({"kind": "random", "input_tokens": 512, "output_tokens": 128,
        "range_ratio": 0.5, "range_convention": "vllm", "num_requests": 100, "seed": 7,
        "prompt_form": "words", "exact_output": true});
    assert_eq!(
        described("--input-tokens 512 --range-ratio 0.5 --seed 7").unwrap(),
        random
    );
    let fixed = described("--workload fixed --lengths 5000:250 --num-prompts 9").unwrap();
    assert_eq!(
        (&fixed["input_tokens"], &fixed["output_tokens"]),
        (&json!(5000), &json!(250))
    );
    assert_eq!(
        (&fixed["num_requests"], &fixed["range_ratio"]),
        (&json!(9), &json!(null))
    );
    let prefill = described("--workload prefill-only --range-ratio 0.5").unwrap();
    assert_eq!(
        (&prefill["kind"], &prefill["output_tokens"]),
        (&json!("prefill_only"), &json!(1))
    );
    let turns = described("--workload multi-turn --turns 3 --think-time-s 1.5").unwrap();
    assert_eq!(
        (&turns["turns"], &turns["think_time_s"]),
        (&json!(3), &json!(1.5))
    );
    let trace = described("--workload trace --trace-file a.csv --trace-speed-up 4").unwrap();
    assert_eq!(
        (&trace["format"], &trace["speed_up"]),
        (&json!("azure"), &json!(4.0))
    );
    assert_eq!(
        (&trace["file"], &trace["num_requests"]),
        (&json!("a.csv"), &json!(null))
    );
    let prompts = described("--workload prompts --prompts-file p.jsonl").unwrap();
    assert_eq!(prompts["exact_output"], json!(false));
    let shared = described("--workload shared-prefix --answers natural").unwrap();
    assert_eq!(
        (&shared["prefix_groups"], &shared["exact_output"]),
        (&json!(8), &json!(false))
    );
}

#[test]
fn prefill_only_asks_for_one_token_at_any_range() {
    let words = "--workload prefill-only --input-tokens 20 --range-ratio 1";
    let plan = parse(words)
        .unwrap()
        .workload
        .plan(Api::Completions)
        .unwrap();
    let mut workload = plan.build().unwrap();
    let outputs: Vec<u32> = std::iter::from_fn(|| workload.next())
        .map(|p| p.output_tokens)
        .collect();
    assert_eq!(outputs, [1; 100]);
}

#[test]
fn prompts_take_the_form_that_fits() {
    let tokenizer = format!("--input-tokens 20 --tokenizer {}", model());
    let planned = first(&tokenizer, Api::Completions).unwrap();
    assert!(matches!(planned.prompt, Prompt::Tokens(tokens) if tokens.len() == 20));
    let planned = first(&format!("{tokenizer} --prompt-as text"), Api::Completions).unwrap();
    assert!(matches!(planned.prompt, Prompt::Text(_)));
    assert_eq!(planned.input_tokens, Some(20));
    let planned = first("--input-tokens 20", Api::Chat).unwrap();
    assert!(matches!(planned.prompt, Prompt::Messages(_)));
    assert_eq!(planned.input_tokens, None);
    assert!(first(&format!("{tokenizer} --prompt-as tokens"), Api::Chat).is_err());
    let said = first("--prompt-as text", Api::Chat).unwrap_err();
    assert!(
        said.contains("--prompt-as text needs --tokenizer"),
        "{said}"
    );
}

#[test]
fn options_of_other_workloads_are_refused() {
    for (words, option, kind) in [
        ("--turns 3", "--turns", "--workload random"),
        (
            "--workload fixed --range-ratio 0.5",
            "--range-ratio",
            "--workload fixed",
        ),
        (
            "--workload prefill-only --output-tokens 5",
            "--output-tokens",
            "prefill-only",
        ),
        (
            "--workload prefill-only --lengths 5:5",
            "--lengths",
            "prefill-only",
        ),
        (
            "--workload trace --trace-file x --input-tokens 5",
            "--input-tokens",
            "trace",
        ),
        (
            "--workload prompts --prompts-file x --trace-file y",
            "--trace-file",
            "prompts",
        ),
        (
            "--workload decode-only --prefix-groups 2",
            "--prefix-groups",
            "decode-only",
        ),
    ] {
        let said = described(words).unwrap_err();
        assert!(
            said.contains(option) && said.contains(kind),
            "{words}: {said}"
        );
    }
    let said = described("--workload trace").unwrap_err();
    assert!(
        said.contains("--workload trace needs --trace-file"),
        "{said}"
    );
    let said = described("--workload prompts").unwrap_err();
    assert!(
        said.contains("--workload prompts needs --prompts-file"),
        "{said}"
    );
    let backwards = "--workload trace --trace-file x --trace-from-s 9 --trace-until-s 9";
    let said = described(backwards).unwrap_err();
    assert!(said.contains("begins at 9 s"), "{said}");
}

#[test]
fn values_out_of_range_are_refused() {
    for words in [
        "--input-tokens 0",
        "--input-tokens 10000001",
        "--lengths 5",
        "--lengths 5:0",
        "--lengths 5:5 --input-tokens 5",
        "--range-ratio 1.1",
        "--range-ratio nan",
        "--range-convention sglang",
        "--num-requests 0",
        "--workload other",
        "--request-rate 0",
        "--request-rate nan",
        "--burstiness 0",
        "--max-concurrency 0",
        "--ramp-s -1",
    ] {
        assert!(parse(words).is_err(), "{words}");
    }
    let said = parse("--lengths 5:0").unwrap_err();
    assert!(said.contains("5000:250"), "{said}");
}

#[test]
fn arrivals_follow_from_what_is_given() {
    let process = |words: &str, has_times| arrival(words, has_times).unwrap().process;
    assert_eq!(process("", false), Process::AllAtOnce);
    assert_eq!(process("--request-rate inf", false), Process::AllAtOnce);
    assert_eq!(process("--max-concurrency 4", false), Process::Closed);
    assert_eq!(
        process("--request-rate inf --max-concurrency 4", false),
        Process::Closed
    );
    let rate = 2.5;
    assert_eq!(
        process("--request-rate 2.5", false),
        Process::Poisson { rate }
    );
    let gamma = Process::Gamma {
        rate,
        burstiness: 0.5,
    };
    assert_eq!(process("--request-rate 2.5 --burstiness 0.5", false), gamma);
    let constant = "--arrival constant --request-rate 2.5";
    assert_eq!(process(constant, false), Process::Constant { rate });
    assert_eq!(process("", true), Process::Trace);
    assert_eq!(process("--max-concurrency 4", true), Process::Trace);
    assert_eq!(
        process("--request-rate 2.5", true),
        Process::Poisson { rate }
    );
    assert_eq!(process("--arrival all-at-once", true), Process::AllAtOnce);
    let ramped = arrival("--max-concurrency 4 --ramp-s 3", false).unwrap();
    assert_eq!((ramped.max_concurrency, ramped.ramp_s), (Some(4), 3.0));
}

#[test]
fn arrivals_that_make_no_sense_are_refused() {
    for (words, needed) in [
        ("--arrival constant", "--request-rate"),
        ("--arrival closed", "--max-concurrency"),
        ("--arrival gamma --request-rate 2", "--burstiness"),
        (
            "--arrival poisson --request-rate 2 --burstiness 2",
            "--burstiness",
        ),
        (
            "--arrival closed --max-concurrency 2 --request-rate 2",
            "--request-rate",
        ),
        ("--burstiness 2", "--burstiness"),
        ("--ramp-s 2", "--ramp-s"),
        ("--arrival trace", "--workload trace"),
    ] {
        let said = arrival(words, false).unwrap_err();
        assert!(said.contains(needed), "{words}: {said}");
    }
}
