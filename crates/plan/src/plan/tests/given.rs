//! What a plan was made with is in what starts it.

use clap::Parser;

use super::super::args::PlanArgs;
use super::super::run;
use super::{RATES, plan, plan_of, plan_text};

#[test]
fn values_are_written_only_for_a_design_that_meets_the_objectives() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("values.yaml");
    let words = "plan --gpus 1 --quick --lengths 500:50 --rates".split(' ');
    for (slo, met) in [("ttft=1s,tpot=1ms", false), ("ttft=1s,tpot=30ms", true)] {
        let more = [RATES, "--slo", slo, "--values", path.to_str().unwrap()];
        let args = PlanArgs::try_parse_from(words.clone().chain(more)).unwrap();
        assert_eq!(run(&args).unwrap(), met);
        assert_eq!(path.exists(), met, "{slo}");
    }
}

#[test]
fn limits_that_were_planned_with_are_in_the_command_and_the_values() {
    let words = ["--lengths", "500:50"];
    let limits = [
        "--block-size",
        "16",
        "--max-model-len",
        "4096",
        "--max-running-requests",
        "8",
    ];
    let found = plan(&[&words[..], &limits].concat());
    let command = &found.command;
    assert!(command.ends_with(&limits.join(" ")), "{command}");
    let quoted = limits.map(|word| format!("\"{word}\"")).join(", ");
    let values = &found.helm_values;
    assert!(values.contains(&quoted), "{values}");
    // `tasuki serve` has defaults of its own.
    let command = plan(&words).command;
    assert!(!command.contains("--block-size"), "{command}");
}

#[test]
fn a_size_of_steps_that_is_given_is_the_only_one_that_is_tried() {
    let words = ["--gpus", "2", "--lengths", "500:50", "--designs", "2"];
    let short = ["--probe-requests", "50", "--no-variations"];
    let sizes = |more: &[&str]| -> Vec<String> {
        let found = plan_of(&[&words[..], &short, more].concat()).simulated;
        let mut sizes: Vec<_> = found.iter().map(|f| f.design.steps()).collect();
        sizes.sort();
        sizes.dedup();
        sizes
    };
    assert_eq!(sizes(&["--max-batched-tokens", "512"]), ["512"]);
    assert!(sizes(&[]).len() > 3);
}

#[test]
fn a_rate_below_one_keeps_three_digits() {
    let words = ["--lengths", "500:50", "--request-rate", "0.00125"];
    let text = plan_text(&words);
    assert!(text.contains("at 0.00125 requests/s"), "{text}");
    assert!(text.contains("goodput 0.00125;"), "{text}");
}

#[test]
fn a_plan_that_meets_nothing_does_not_say_that_its_best_would() {
    let text = plan_text(&["--lengths", "500:50", "--slo", "ttft=1s,tpot=1ms"]);
    assert!(text.contains("no design meets the objectives"), "{text}");
    assert!(text.contains("\n  expected at "), "{text}");
    assert!(!text.contains("would at"), "{text}");
}
