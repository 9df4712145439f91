//! Plans of short files: the rate that is found is one that the file can show.

mod given;
mod logs;
mod run_length;

use std::fmt::Write;
use std::fs;
use std::path::Path;

use clap::Parser;

use super::args::PlanArgs;
use super::planner::{Plan, Planner};

const RATES: &str = "step-ms=6,sequence-us=20,kv-token-ns=30,prompt-step-ms=6,prompt-token-us=20,\
                     prompt-square-ns=0.2";

/// The plan of these options for two GPUs.
fn plan(words: &[&str]) -> Plan {
    plan_of(&[&["--gpus", "2", "--quick"], words].concat())
}

fn plan_of(words: &[&str]) -> Plan {
    let slo = if words.contains(&"--slo") {
        &[][..]
    } else {
        &["--slo", "ttft=1s,tpot=30ms"]
    };
    let fixed = ["plan", "--rates", RATES];
    let args = PlanArgs::try_parse_from(fixed.iter().chain(slo).chain(words)).unwrap();
    let mut planner = Planner::new(&args).unwrap();
    planner.plan().unwrap()
}

fn plan_text(words: &[&str]) -> String {
    super::text(&plan(words), 0.0)
}

fn trace(folder: &Path, requests: usize) -> String {
    let mut text = String::new();
    for index in 0..requests {
        let at_ms = 50 * index;
        let line = format!(r#"{{"timestamp":{at_ms},"input_length":1000,"output_length":100}}"#);
        let _ = writeln!(text, "{line}");
    }
    let path = folder.join(format!("{requests}.jsonl"));
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_short_trace_shows_no_higher_rate_than_its_requests_can_fill() {
    let folder = tempfile::tempdir().unwrap();
    let of = |requests: usize, more: &[&str]| {
        let file = trace(folder.path(), requests);
        let words = ["--workload", "trace", "--trace-file", &file];
        plan(&[&words, more].concat()).best
    };
    // A request that just meets the objectives takes 1 s + 100 x 30 ms = 4 s. A run must take 0.8
    // of that: n requests show a rate of n / 3.2 s at most.
    for requests in [1, 2, 10] {
        let best = of(requests, &[]);
        let most = requests as f64 / 3.2;
        assert!(
            best.rate > 0.8 * most && best.rate <= most,
            "{requests}: {}",
            best.rate
        );
        assert!(
            best.at_least && best.binds.contains("more requests"),
            "{}",
            best.binds
        );
    }
    let best = of(10, &["--num-requests", "5"]);
    assert!(best.rate <= 5.0 / 3.2, "{}", best.rate);
    assert!(
        best.binds.contains("raise --num-requests"),
        "{}",
        best.binds
    );
    let best = of(1_500, &[]);
    assert!(
        best.rate > 10.0 && !best.at_least,
        "{}, {}",
        best.rate,
        best.binds
    );
}

#[test]
fn rates_and_lengths_of_conversations_are_those_of_all_turns() {
    let words =
        "--workload multi-turn --turns 5 --turn-input-tokens 50 --lengths 1000:50 --price 1";
    let found = plan(&words.split_whitespace().collect::<Vec<_>>());
    // Prompts have 1,000 tokens and 100 more in every turn.
    let lengths = found.lengths;
    assert_eq!((lengths.prompt, lengths.output), (1_200.0, 50.0));
    // Of five prompts a worker computes 1,400 tokens of 20 us: the rest is cached.
    let most = 2.0 * 5.0 / (1_400.0 * 20e-6);
    let rate = found.best.rate;
    assert!(rate > 0.2 * most && rate < 1.12 * most, "{rate}, {most}");
    // Two GPUs of 1 an hour, and 50 tokens in each request.
    let cost = 1e6 * 2.0 / (3_600.0 * 50.0 * rate);
    let told = found.best.cost_per_million_tokens.unwrap();
    assert!((told / cost - 1.0).abs() < 1e-9, "{told}, {cost}");
}

#[test]
fn requests_that_no_worker_takes_are_refused() {
    let of = |words: &[&str]| {
        let fixed = [
            "plan",
            "--slo",
            "ttft=1s,tpot=30ms",
            "--rates",
            RATES,
            "--gpus",
            "2",
        ];
        let args = PlanArgs::try_parse_from(fixed.iter().chain(words)).unwrap();
        Planner::new(&args)
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    let error = of(&["--lengths", "990:20", "--max-model-len", "1000"]).unwrap_err();
    for word in ["100.0% of", "1010 tokens", "--max-model-len is 1000"] {
        assert!(error.contains(word), "{error}");
    }
    // About half of them are: more than a tenth may miss the objectives.
    let half = [
        "--lengths",
        "900:100",
        "--range-ratio",
        "0.5",
        "--max-model-len",
        "1000",
    ];
    assert!(of(&half).is_err());
    of(&[&half[..], &["--attainment", "0.2"]].concat()).unwrap();
}

#[test]
fn gpus_that_workers_cannot_use_are_refused_with_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let of = |layers: u32, words: &str| {
        let config = format!(
            r#"{{"hidden_size":8192,"num_hidden_layers":{layers},"num_attention_heads":64,
                "vocab_size":128256,"intermediate_size":28672,"num_key_value_heads":8}}"#
        );
        fs::write(folder.path().join("config.json"), config).unwrap();
        let fixed = "plan --slo ttft=1s,tpot=30ms --quick --gpu h200 --lengths 500:20 --model";
        let model = folder.path().to_str().unwrap();
        let words = fixed.split(' ').chain([model]).chain(words.split(' '));
        let args = PlanArgs::try_parse_from(words).unwrap();
        let found = Planner::new(&args).and_then(|mut planner| planner.plan());
        found.unwrap_err().to_string()
    };
    let error = of(8, "--gpus 4 --tensor-parallel 3");
    assert!(error.contains("give a multiple of 3"), "{error}");
    let error = of(160, "--gpus 2");
    assert!(error.contains("raise --gpus and"), "{error}");
    let error = of(160, "--gpus 4 --tensor-parallel 2");
    assert!(error.contains("raise --tensor-parallel"), "{error}");
}

#[test]
fn what_makes_runs_longer_is_an_option_that_counts() {
    let fixed =
        "plan --slo ttft=60s,tpot=1s --lengths 100:100 --gpus 1 --designs 1 --no-variations";
    for (more, remedy) in [
        ("--quick", "leave out --quick"),
        ("--probe-requests=50", "raise --probe-requests"),
    ] {
        let words = fixed.split(' ').chain([more, "--rates", RATES]);
        let args = PlanArgs::try_parse_from(words).unwrap();
        let best = Planner::new(&args).unwrap().plan().unwrap().best;
        assert!(best.binds.contains(remedy), "{}", best.binds);
    }
}

#[test]
fn what_most_requests_miss_is_named() {
    let binds = |words: &[&str]| plan(words).best.binds;
    // One token has no TPOT, and a prompt of 200,000 tokens takes longer than a second.
    let text = plan_text(&["--lengths", "2000:1"]);
    assert!(text.contains("TTFT breaks first"), "{text}");
    assert!(text.contains("- / -") && !text.contains("NaN"), "{text}");
    let long = [
        "--lengths",
        "200000:10",
        "--num-blocks",
        "40000",
        "--max-model-len",
        "262144",
    ];
    assert_eq!(binds(&long), "TTFT breaks first");
    for (slo, breaks) in [
        ("ttft=10s,tpot=30ms,e2e=1s", "E2E breaks first"),
        ("ttft=1s,tpot=30ms,itl=15ms", "ITL breaks first"),
    ] {
        let found = binds(&["--lengths", "1000:100", "--slo", slo]);
        assert!(found.contains(breaks), "{slo}: {found}");
    }
}

#[test]
fn a_plan_takes_no_faults() {
    let words = [
        "plan",
        "--slo",
        "ttft=1s",
        "--gpus",
        "2",
        "--fault",
        "crash:0@30",
    ];
    let error = PlanArgs::try_parse_from(words).unwrap_err();
    assert_eq!(error.kind(), clap::error::ErrorKind::UnknownArgument);
}

/// A log whose requests arrive at these times.
fn log(folder: &Path, times_s: &[f64]) -> String {
    let mut text = concat!(
        r#"{"tasuki_request_log":1,"tasuki":"1","began_unix_s":0.0,"router":{"policy":"cost","#,
        r#""strict_roles":false,"role_preference":0.05,"admission":true}}"#,
        "\n",
        r#"{"fleet":{"t":0.0,"workers":[{"id":4,"role":"mixed","ready":true,"machine":1,"#,
        r#""class":0,"num_blocks":8000,"block_size_tokens":32,"max_model_len_tokens":16384,"#,
        r#""reports_cache":true}],"classes":[]}}"#,
        "\n"
    )
    .to_owned();
    for time_s in times_s {
        let _ = writeln!(
            text,
            r#"{{"t":{time_s},"i":1000,"o":100,"f":50.0,"e":900.0}}"#
        );
    }
    let path = folder.join("requests.log");
    fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_log_of_one_time_tells_no_rate_to_expect() {
    let folder = tempfile::tempdir().unwrap();
    for times_s in [&[7.0][..], &[7.0, 7.0, 7.0]] {
        let plan = plan(&["--from", &log(folder.path(), times_s)]);
        assert!((plan.expected.rate - 0.8 * plan.best.rate).abs() < 1e-9);
        assert!(plan.notes[0].contains("--request-rate"));
    }
    let plan = plan(&["--from", &log(folder.path(), &[7.0, 7.5])]);
    assert!(
        (plan.expected.rate - 2.0).abs() < 1e-6,
        "{}",
        plan.expected.rate
    );
    assert!(plan.notes.is_empty(), "{:?}", plan.notes);
}

#[test]
fn a_log_that_begins_quietly_has_no_higher_rate() {
    let folder = tempfile::tempdir().unwrap();
    let of = |gaps: [f64; 2]| {
        let times = (0..4_000).scan(0.0, |at_s: &mut f64, index| {
            *at_s += gaps[index / 2_000];
            Some(*at_s)
        });
        let times: Vec<f64> = times.collect();
        plan(&["--from", &log(folder.path(), &times)]).best.rate
    };
    // Runs have the first requests only.
    let (even, quiet) = (of([0.05, 0.05]), of([1.0, 0.02]));
    assert!((quiet / even - 1.0).abs() < 0.01, "{quiet}, {even}");
}

#[test]
fn requests_beyond_the_highest_rate_make_no_token_cheaper() {
    let words = ["--lengths", "1000:100", "--price", "3.5", "--request-rate"];
    let cost = |rate| {
        let found = plan(&[&words[..], &[rate]].concat());
        let highest = found.best.cost_per_million_tokens.unwrap();
        found.expected_cost_per_million_tokens.unwrap() / highest
    };
    assert!(cost("1") > 10.0);
    assert_eq!(cost("5000"), 1.0);
}

#[test]
fn refused_requests_of_a_log_are_expected_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = log(folder.path(), &[7.0, 7.5, 8.0]);
    let mut text = fs::read_to_string(&path).unwrap();
    for outcome in ["refused", "unavailable", "rejected"] {
        let _ = writeln!(
            text,
            r#"{{"t":7.6,"i":1000,"o":0,"e":1.0,"z":"{outcome}"}}"#
        );
    }
    fs::write(&path, text).unwrap();
    let found = plan(&["--from", &path]);
    // Two a second were served, three of five were.
    assert!(
        (found.expected.rate - 2.0 * 5.0 / 3.0).abs() < 1e-3,
        "{}",
        found.expected.rate
    );
    let notes = found.notes.join("\n");
    assert!(
        notes.contains("1 were refused") && notes.contains("3.33 came"),
        "{notes}"
    );
    let given = plan(&["--from", &path, "--request-rate", "2"]);
    assert_eq!((given.expected.rate, given.notes.len()), (2.0, 1));
}

#[test]
fn a_worker_of_a_log_has_as_many_gpus_as_it_had() {
    let folder = tempfile::tempdir().unwrap();
    let path = log(folder.path(), &[7.0, 7.5, 8.0]);
    let class = r#""classes":[{"device":"NVIDIA H200","tensor_parallel":4,"step_ms":6.0,"#
        .to_owned()
        + r#""sequence_us":20.0,"kv_token_ns":30.0,"prompt_step_ms":6.0,"prompt_token_us":20.0,"#
        + r#""prompt_square_ns":0.2}]"#;
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace(r#""classes":[]"#, &class)).unwrap();
    let of = |gpus: &str| {
        let words = "plan --slo ttft=1s,tpot=30ms --quick --from".split(' ');
        let words = words.chain([&*path, "--gpus"]).chain(gpus.split(' '));
        let args = PlanArgs::try_parse_from(words).unwrap();
        Planner::new(&args).and_then(|mut planner| planner.plan())
    };
    let found = of("8").unwrap();
    assert_eq!(found.best.name, "2 mixed x4");
    assert!(
        found.command.contains("--mixed 2 --tp-mixed 4"),
        "{}",
        found.command
    );
    assert!(
        found.helm_values.contains("gpus: 4"),
        "{}",
        found.helm_values
    );
    for (gpus, said) in [("6", "6, 8 a machine"), ("12 --gpus-per-host 6", "12, 6 a")] {
        let error = of(gpus).unwrap_err().to_string();
        assert!(
            error.contains(said) && error.contains("multiple of 4"),
            "{error}"
        );
    }
}

#[test]
fn a_log_that_tells_of_no_steps_needs_another_source_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = log(folder.path(), &[7.0, 7.5, 8.0]);
    let text = fs::read_to_string(&path).unwrap();
    let class = tasuki_reqlog::Class::new("vllm", 1, &tasuki_core::Rates::default());
    let classes = format!(r#""classes":[{}]"#, serde_json::to_string(&class).unwrap());
    for text in [text.clone(), text.replace(r#""classes":[]"#, &classes)] {
        fs::write(&path, text).unwrap();
        let words = "plan --slo ttft=1s,tpot=30ms --quick --gpus 2 --from";
        let args = PlanArgs::try_parse_from(words.split(' ').chain([&*path])).unwrap();
        let found = Planner::new(&args).map(|_| ()).map_err(|e| e.to_string());
        assert!(
            found
                .unwrap_err()
                .contains("does not say how long steps take")
        );
        assert!(plan(&["--from", &path]).best.rate > 0.0);
    }
}

#[test]
fn a_trace_with_its_latest_time_is_simulated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("late.jsonl");
    let line = |at_ms: &str| {
        format!(r#"{{"timestamp":{at_ms},"input_length":10,"output_length":10000000}}"#)
    };
    fs::write(&path, [line("0"), line("1e13")].join("\n")).unwrap();
    let words = [
        "--rates",
        RATES,
        "--workload",
        "trace",
        "--trace-file",
        path.to_str().unwrap(),
        "--trace-speed-up",
        "0.001",
    ];
    // No request fits into a worker.
    assert_eq!(crate::run_simulate(words.map(str::to_owned).to_vec()), 1);
}
