//! Plans of logs: their loads change, and some of their prompts are cached.

use clap::Parser;

use super::super::args::PlanArgs;
use super::super::design;
use super::super::planner::Planner;
use super::{RATES, log, plan, plan_text};

/// Whether two mixed workers are said to have a queue that grows, at this rate.
fn is_outgrown(path: &str, rate: f64) -> bool {
    let words = "plan --quick --gpus 2 --slo ttft=1s,tpot=30ms --rates";
    let words = words.split(' ').chain([RATES, "--from", path]);
    let args = PlanArgs::try_parse_from(words).unwrap();
    let planner = Planner::new(&args).unwrap();
    let designs = design::all(2, &[1], 4_096);
    let two_mixed = designs.iter().find(|d| d.name() == "2 mixed").unwrap();
    let (run, failed) = planner.judge(two_mixed, rate).unwrap();
    assert!(!failed, "{rate}");
    planner.is_outgrown(&run)
}

#[test]
fn a_load_that_grows_is_no_queue_that_grows() {
    let folder = tempfile::tempdir().unwrap();
    // 20 requests a second and 40, for 100 requests each.
    for gaps_s in [[0.05, 0.025], [0.025, 0.05]] {
        let gap_s = |index: usize| gaps_s[index / 100];
        let time_s = |index: usize| (0..index).map(gap_s).sum();
        let times_s: Vec<f64> = (0..200).map(time_s).collect();
        let path = log(folder.path(), &times_s);
        for rate in [10.0, 20.0, 30.0] {
            assert!(!is_outgrown(&path, rate), "{gaps_s:?} {rate}");
        }
    }
    // An even load that is too high: a prompt takes 20 ms of a worker, and there are answers.
    let times_s: Vec<f64> = (0..200).map(|index| 0.05 * f64::from(index)).collect();
    assert!(is_outgrown(&log(folder.path(), &times_s), 70.0));
}

#[test]
fn prompts_of_a_log_are_as_long_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let path = log(folder.path(), &[7.0, 7.5, 8.0]);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace(r#""o":100"#, r#""o":100,"c":768"#)).unwrap();
    let lengths = plan(&["--from", &path]).lengths;
    assert_eq!((lengths.prompt, lengths.output), (1_000.0, 100.0));
    let text = plan_text(&["--from", &path]);
    assert!(
        text.contains("prompts of 1000 tokens, 768 of them cached,"),
        "{text}"
    );
}
