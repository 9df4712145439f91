//! The steps are those of the engine: cases of `tests/golden/worker_steps.json`, with which it is
//! tested too.

use serde::Deserialize;

use super::*;

#[derive(Debug, Deserialize)]
struct Case {
    num_blocks: u32,
    max_batched_tokens: u32,
    max_running_requests: u32,
    itl_target_s: Option<f64>,
    launch_s: f64,
    rates: Coefficients,
    requests: Vec<Asked>,
    steps: Vec<Step>,
    tokens_s: Vec<Vec<f64>>,
}

#[derive(Debug, Deserialize)]
struct Coefficients {
    step_s: f64,
    sequence_s: f64,
    kv_token_s: f64,
    prompt_step_s: f64,
    prompt_token_s: f64,
}

#[derive(Debug, Deserialize)]
struct Asked {
    at_s: f64,
    prompt: u32,
    output: u32,
}

/// A step with prompts in it.
#[derive(Debug, Deserialize, PartialEq)]
struct Step {
    begins_s: f64,
    decodes: u32,
    /// Request and tokens.
    chunks: Vec<(u32, u32)>,
}

fn cases() -> Vec<Case> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden");
    let text = std::fs::read_to_string(format!("{folder}/worker_steps.json")).expect("the file");
    let cases: Vec<Case> = serde_json::from_str(&text).expect("golden cases");
    assert!(cases.len() >= 30);
    cases
}

fn worker_of(case: &Case) -> Worker {
    let rates = Rates {
        step_s: case.rates.step_s,
        sequence_s: case.rates.sequence_s,
        kv_token_s: case.rates.kv_token_s,
        prompt_step_s: case.rates.prompt_step_s,
        prompt_token_s: case.rates.prompt_token_s,
        prompt_square_s: 0.0,
    };
    let limits = Limits {
        num_blocks: case.num_blocks,
        max_model_len: 1_024,
        max_batched_tokens: case.max_batched_tokens,
        max_running_requests: case.max_running_requests,
        itl_target_s: case.itl_target_s,
        launch_s: case.launch_s,
        receive_s: 0.0,
        ..Limits::cpu(2, 2)
    };
    worker_at(rates, limits)
}

/// The worker's steps with prompts, and the times of each request's first and last token.
fn run(case: &Case) -> (Vec<Step>, Vec<Vec<f64>>) {
    let mut worker = worker_of(case);
    let (mut steps, mut tokens_s) = (Vec::new(), vec![Vec::new(); case.requests.len()]);
    let mut left = case.requests.iter().zip(0..).peekable();
    loop {
        // Nothing is known of a request before its time.
        while let Some((asked, request)) = left.next_if(|(asked, _)| {
            let at = Time::from_s(asked.at_s);
            at <= worker.next
        }) {
            let at = Time::from_s(asked.at_s);
            let leg = NewLeg {
                request,
                ..leg(asked.prompt, asked.output)
            };
            worker.submit(leg, at);
        }
        let now = worker.next;
        if now == Time::NEVER {
            break;
        }
        worker.turn(now);
        for told in &worker.told {
            if let Told::First(seq) | Told::Finished(seq) = *told {
                let times: &mut Vec<f64> = &mut tokens_s[worker.sequence(seq).leg.request as usize];
                if times.last() != Some(&now.as_s()) {
                    times.truncate(1);
                    times.push(now.as_s());
                }
            }
        }
        worker.forget_gone();
        let Some(flight) = worker.flight.as_ref().filter(|f| !f.chunks.is_empty()) else {
            continue;
        };
        let request = |seq: SeqId| worker.sequence(seq).leg.request;
        let chunks = flight.chunks.iter();
        let mut chunks: Vec<_> = chunks.map(|&(seq, n)| (request(seq), n)).collect();
        chunks.sort_unstable();
        steps.push(Step {
            begins_s: flight.began.as_s(),
            decodes: flight.decodes,
            chunks,
        });
    }
    (steps, tokens_s)
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-5
}

#[test]
fn a_worker_takes_the_steps_of_an_engine() {
    for case in &cases() {
        let (steps, tokens_s) = run(case);
        for (step, expected) in steps.iter().zip(&case.steps) {
            let same = step.chunks == expected.chunks && step.decodes == expected.decodes;
            let begins = near(step.begins_s, expected.begins_s);
            assert!(same && begins, "{step:?} {expected:?} {case:?}");
        }
        assert_eq!(steps.len(), case.steps.len(), "{case:?}");
        for (times, expected) in tokens_s.iter().zip(&case.tokens_s) {
            let same = times.iter().zip(expected).all(|(&a, &b)| near(a, b));
            assert!(same && times.len() == expected.len(), "{times:?} {case:?}");
        }
    }
}
