//! What a run came to, in the terms of `tasuki bench serve`.

use serde_json::{Value, json};
use tasuki_bench::client::Failure;
use tasuki_bench::phases::Phases;
use tasuki_bench::recorder::{Arrived, Record, TokenCountSource};
use tasuki_sim::{Outcome, Run};

/// Requests as a client would have recorded them.
pub fn records(run: &Run) -> Vec<Record> {
    run.outcomes.iter().map(record).collect()
}

fn record(outcome: &Outcome) -> Record {
    let arrived = outcome.token_times.iter().map(|at| Arrived {
        at_s: at.as_s(),
        tokens: 1,
    });
    let failure = outcome.failure.clone();
    Record {
        index: outcome.index,
        due_s: outcome.due.as_s(),
        sent_s: outcome.sent.as_s(),
        end_s: outcome.end.as_s(),
        input_tokens: Some(outcome.prompt_tokens),
        output_tokens: Some(outcome.output_tokens),
        source: TokenCountSource::Chunks,
        arrived: arrived.collect(),
        failure: failure.map(|reason| Failure::Simulated { reason }),
        phases: Some(phases(outcome)),
    }
}

fn phases(outcome: &Outcome) -> Phases {
    let ms = |seconds: f64| Some(1e3 * seconds);
    let admitted = outcome.admitted.unwrap_or(outcome.sent);
    let queue_s = admitted.s_since(outcome.sent) + outcome.queue_s;
    let first_s = outcome.first.map(|first| first.s_since(outcome.sent));
    let split = outcome.is_split();
    Phases {
        queue_ms: ms(queue_s),
        prefill_ms: first_s.and_then(|first_s| ms((first_s - queue_s).max(0.0))),
        first_token_ms: first_s.and_then(ms),
        transfer_ms: split.then_some(1e3 * outcome.transfer_s),
        transfer_exposed_ms: split.then_some(1e3 * outcome.exposed_s),
        total_ms: ms(outcome.end.s_since(outcome.sent)),
        ..Phases::default()
    }
}

/// What only a simulation can tell: for result files, and below the table.
pub fn told(run: &Run, source: &str) -> Value {
    let over_s = run.ended.as_s().max(1e-9);
    let workers: Vec<Value> = run
        .workers
        .iter()
        .map(|worker| {
            json!({
                "busy": worker.busy_s / over_s,
                "busy_with_prompts": worker.prompt_steps_s / over_s,
                "steps": worker.steps,
                "prompt_tokens": worker.prompt_tokens,
                "cached_tokens": worker.cached_tokens,
                "output_tokens": worker.output_tokens,
                "preemptions": worker.preemptions,
                "peak_blocks": worker.peak_blocks,
            })
        })
        .collect();
    let split = run
        .outcomes
        .iter()
        .filter(|outcome| outcome.is_split())
        .count();
    let retries: u32 = run.outcomes.iter().map(|outcome| outcome.retries).sum();
    let changes: Vec<Value> = run
        .role_changes
        .iter()
        .map(|change| {
            json!({
                "at_s": change.at.as_s(),
                "worker": change.worker,
                "from": change.from.as_str(),
                "to": change.to.as_str(),
                "reason": change.reason,
            })
        })
        .collect();
    json!({
        "steps": source,
        "split_requests": split,
        "retries": retries,
        "moved_bytes": run.moved_bytes,
        "role_changes": changes,
        "workers": workers,
    })
}

#[cfg(test)]
mod tests {
    use tasuki_sim::{Counters, Request, Time};

    use super::*;

    #[test]
    fn phases_and_shares_are_those_of_the_run() {
        let at = Time::from_s;
        let outcome = Outcome {
            admitted: Some(at(1.5)),
            queue_s: 0.25,
            first: Some(at(2.0)),
            end: at(3.0),
            exposed_s: 0.125,
            transfer_s: 0.5,
            prefill: 0,
            decode: 1,
            ..Outcome::new(&Request::new(0, at(0.5), 100, 10), at(1.0))
        };
        let run = Run {
            outcomes: vec![outcome],
            workers: vec![Counters {
                busy_s: 4.0,
                prompt_steps_s: 2.0,
                ..Counters::default()
            }],
            ended: at(8.0),
            ..Run::default()
        };
        let [record] = &records(&run)[..] else {
            panic!("one request");
        };
        assert_eq!((record.due_s, record.sent_s, record.end_s), (0.5, 1.0, 3.0));
        let phases = record.phases.expect("they are known");
        assert_eq!(
            (phases.queue_ms, phases.prefill_ms),
            (Some(750.0), Some(250.0))
        );
        assert_eq!(
            (phases.first_token_ms, phases.total_ms),
            (Some(1e3), Some(2e3))
        );
        assert_eq!(phases.transfer_ms, Some(500.0));
        assert_eq!(phases.transfer_exposed_ms, Some(125.0));
        let told = told(&run, "");
        assert_eq!(told["workers"][0]["busy"], 0.5);
        assert_eq!(told["workers"][0]["busy_with_prompts"], 0.25);
        assert_eq!(told["split_requests"], 1);
    }
}
