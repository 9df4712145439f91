//! A run shows whether a rate is too high.

use clap::Parser;

use super::super::args::PlanArgs;
use super::super::design;
use super::super::planner::Planner;
use super::{RATES, plan_of};

const FEW: [&str; 5] = [
    "--designs",
    "1",
    "--no-variations",
    "--probe-requests",
    "50",
];

#[test]
fn no_rate_is_promised_at_which_a_queue_grows() {
    let full = |gpus: &'static str| [&["--gpus", gpus], &FEW[..]].concat();
    let quick = vec!["--gpus", "2", "--quick"];
    for (gpus, above, words) in [(2.0, 1.12, quick), (4.0, 1.06, full("4"))] {
        // A prompt of 2,000 tokens takes 2,000 x 20 us + 2,000^2 x 0.2 ns = 40.8 ms of a GPU.
        let most = gpus / 0.0408;
        let words = [&words[..], &["--lengths", "2000:1"]].concat();
        let found = plan_of(&words);
        let rate = found.best.rate;
        assert!(rate > 0.8 * most && rate < above * most, "{rate}, {most}");
        let above = format!("{}", 1.4 * most);
        let found = plan_of(&[&words[..], &["--request-rate", &above]].concat());
        let seen = found.expected.attainment;
        assert!(seen < 0.4, "{seen} at {above}");
    }
}

#[test]
fn the_second_half_of_a_run_counts() {
    let words = "plan --slo ttft=1s,tpot=30ms --gpus 2 --lengths 1000:50 --rates";
    let args = PlanArgs::try_parse_from(words.split_whitespace().chain([RATES])).unwrap();
    let planner = Planner::new(&args).unwrap();
    let design = design::all(2, &[1], 4_096)[0];
    let run = planner.judge(&design, 20.0).unwrap().0;
    let counted = planner.counted(&run);
    let all = run.outcomes.len();
    assert!(all >= 2_000, "{all}");
    assert!((0.4..0.6).contains(&(counted.len() as f64 / all as f64)));
    let first = counted.iter().map(|o| o.due).min();
    assert!(run.outcomes.iter().filter(|o| Some(o.due) < first).count() >= all - counted.len() - 1);
}

/// Whether all requests of a run of two mixed workers meet the objectives, and whether it is said
/// to be too short to show a queue.
fn judged(words: &str, rate: f64) -> (bool, bool) {
    let words = format!("plan --gpus 2 {words} --rates {RATES}");
    let args = PlanArgs::try_parse_from(words.split_whitespace()).unwrap();
    let planner = Planner::new(&args).unwrap();
    let (run, failed) = planner
        .judge(&design::all(2, &[1], 4_096)[0], rate)
        .unwrap();
    let met = !failed && planner.counted(&run).len() > 100;
    (met, planner.is_outgrown(&run))
}

#[test]
fn a_queue_that_would_break_an_objective_later_is_noticed() {
    // A step of two prompts of 2,000 tokens takes 6 ms + 2 x 40.8 ms. With 5% too many, those that
    // come after 167 s wait for 8.3 s: less than the objective.
    let prompts = "--lengths 2000:1 --slo ttft=10s,tpot=30ms";
    let most = 2.0 * 2.0 / 0.0876;
    assert_eq!(judged(prompts, 1.05 * most), (true, true));
    assert_eq!(judged(prompts, 0.95 * most), (true, false));
    // Four sequences of a worker decode 1,000 tokens in 6 s: 1.3 requests/s, and a little more.
    let answers = "--lengths 100:1000 --slo ttft=1000s,tpot=30ms --max-running-requests 4";
    assert_eq!(judged(answers, 1.2), (true, false));
    assert_eq!(judged(answers, 1.5), (true, true));
}

#[test]
fn either_half_of_a_run_has_as_many_requests_as_the_rate_says() {
    let words = "plan --slo ttft=1s,tpot=30ms --gpus 2 --lengths 1000:50 --rates";
    for seed in ["1", "2", "3"] {
        let words = words.split_whitespace().chain([RATES, "--seed", seed]);
        let args = PlanArgs::try_parse_from(words).unwrap();
        let planner = Planner::new(&args).unwrap();
        let design = design::all(2, &[1], 4_096)[0];
        let run = planner.judge(&design, 20.0).unwrap().0;
        // 2,000 requests in 100 s. By chance there would be 3% more or fewer in each half.
        let by = |s: f64| run.outcomes.iter().filter(|o| o.due.as_s() < s).count();
        assert!(by(50.0).abs_diff(1_000) <= 2, "{}", by(50.0));
        assert!(by(99.0) > 1_900 && by(100.1) == 2_000, "{}", by(100.1));
    }
}

#[test]
fn conversations_are_under_way_when_a_run_begins() {
    let words = "plan --slo ttft=1s,tpot=30ms --gpus 2 --workload multi-turn --turns 5 \
                 --think-time-s 300 --turn-input-tokens 50 --lengths 1000:50 \
                 --num-blocks 400000 --rates";
    let args = PlanArgs::try_parse_from(words.split_whitespace().chain([RATES])).unwrap();
    let planner = Planner::new(&args).unwrap();
    let design = design::all(2, &[1], 4_096)[0];
    let run = planner.judge(&design, 20.0).unwrap().0;
    // 2,000 requests in 100 s, a twelfth of what a conversation takes.
    let rate = planner.counted(&run).len() as f64 / 50.0;
    assert!((rate / 20.0 - 1.0).abs() < 0.05, "{rate}");
    for turn in 0..5 {
        let all: Vec<_> = run
            .outcomes
            .iter()
            .filter(|o| o.index % 5 == turn)
            .collect();
        assert!(all.len().abs_diff(400) < 40, "{turn}: {}", all.len());
        assert!(
            all.iter()
                .all(|o| o.prompt_tokens == 1_000 + 100 * turn as u32)
        );
        let cached = all.iter().filter(|o| o.cached_tokens >= 896).count();
        // The second worker has not always got what was computed by the first one.
        let least = if turn == 0 { 0 } else { all.len() * 9 / 10 };
        assert!(cached >= least, "{turn}: {cached} of {}", all.len());
    }
}

#[test]
fn of_many_conversations_the_workers_hold_a_share() {
    let words = "plan --slo ttft=1s,tpot=30ms --gpus 2 --workload multi-turn --turns 2 \
                 --think-time-s 3600 --lengths 1280:128 --rates";
    let args = PlanArgs::try_parse_from(words.split_whitespace().chain([RATES])).unwrap();
    let planner = Planner::new(&args).unwrap();
    // One conversation a second: 7,200 of them, of 11 chunks.
    let mut clients = planner.clients(2.0, 100).unwrap();
    let mut chunks = |most| {
        clients
            .held(most)
            .iter()
            .map(|names| names.len())
            .sum::<usize>()
    };
    assert!(chunks(200_000).abs_diff(7_200 * 11) < 200);
    assert!(chunks(10_000).abs_diff(10_000) < 200);
    let mut times = Vec::new();
    while let Some(request) = clients.next() {
        times.push(request.due);
    }
    assert!(
        times.is_sorted() && times.len().abs_diff(100) <= 2,
        "{}",
        times.len()
    );
}

#[test]
fn objectives_of_an_hour_are_met_at_the_rate_that_a_run_can_show() {
    let words = ["--lengths", "500:50", "--slo", "ttft=3600s,tpot=1s"];
    for (most, words) in [
        (1_500.0, [&words[..], &["--gpus", "2", "--quick"]].concat()),
        (200.0, [&words[..], &["--gpus", "2"], &FEW].concat()),
    ] {
        let best = plan_of(&words).best;
        // A run takes twice the TTFT objective at least.
        let shown = most / 7_200.0;
        assert!(
            best.rate > 0.9 * shown && best.rate <= shown,
            "{}",
            best.rate
        );
        assert!(best.binds.contains("longer runs"), "{}", best.binds);
    }
}
