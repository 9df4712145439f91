//! The service over real streams to workers whose words are the test's.

use std::time::{Duration, Instant};

use tasuki_wire::v1::router_message::Message as ToWorker;
use tasuki_wire::v1::worker_message::Message;
use tasuki_wire::v1::{self, FinishReason as F, Leg, LegEndReason as R, LegTimings, Role};

use super::Service;
use super::api::{Event, Finish, Generating, Generation, ServeError, Timings};
use super::config::{Config, Tuning};
use crate::workers::Liveness;
use crate::workers::testing::{FakeWorker, Session, idle, info, soon, until};

fn generation(max_tokens: u32) -> Generation {
    Generation {
        request_id: "r".to_owned(),
        prompt: (0..20).collect(),
        n: 1,
        sampling: v1::SamplingParams {
            max_tokens,
            ..Default::default()
        },
        tenant: String::new(),
        received: Instant::now(),
    }
}

/// A service with one connected fake worker for each role.
async fn serve(
    roles: &[Role],
    tune: impl FnOnce(&mut Tuning),
) -> (Service, Vec<FakeWorker>, Vec<Session>) {
    let mut workers = Vec::new();
    for _ in roles {
        workers.push(FakeWorker::start().await);
    }
    let config = Config {
        workers: workers.iter().map(|w| w.address.to_string()).collect(),
        ..Config::default()
    };
    let mut tuning = Tuning::from(&config);
    tune(&mut tuning);
    let service = Service::start_tuned(&config, tuning);
    let mut sessions = Vec::new();
    for (at, (worker, &role)) in workers.iter_mut().zip(roles).enumerate() {
        let session = worker.session().await;
        session.say(Message::Info(info(&format!("e{at}"), role)));
        sessions.push(session);
    }
    until("all workers", || {
        for (session, &role) in sessions.iter().zip(roles) {
            session.report(v1::StepReport {
                load: Some(idle(role)),
                ..Default::default()
            });
        }
        let text = service.metrics_text();
        let up = text
            .lines()
            .filter(|l| l.starts_with("tasuki_worker_up{") && l.ends_with(" 1"));
        let known = text
            .lines()
            .filter(|l| l.starts_with("tasuki_worker_total_blocks{"));
        up.count() == roles.len() && known.count() == roles.len()
    })
    .await;
    (service, workers, sessions)
}

struct Heard {
    tokens: Vec<u32>,
    finish: Option<Finish>,
    end: Result<Timings, ServeError>,
}

async fn hear(mut generating: Generating) -> Heard {
    let (mut tokens, mut finish) = (Vec::new(), None);
    loop {
        match soon("an event", generating.next()).await.expect("an end") {
            Event::Tokens {
                tokens: more,
                finish: end,
                ..
            } => {
                tokens.extend(more);
                finish = finish.or(end);
            }
            Event::PromptLogprobs(_) => panic!("nobody asked"),
            Event::Done(timings) => {
                let end = Ok(timings);
                return Heard {
                    tokens,
                    finish,
                    end,
                };
            }
            Event::Failed(error) => {
                let end = Err(error);
                return Heard {
                    tokens,
                    finish,
                    end,
                };
            }
        }
    }
}

#[tokio::test]
async fn a_split_request_from_both_workers() {
    let (service, _workers, mut sessions) = serve(&[Role::Prefill, Role::Decode], |_| {}).await;
    assert!(service.readiness().is_ok());
    let limits = service.limits().expect("limits");
    assert_eq!((limits.max_model_len, limits.vocab_size), (1_024, 512));
    let generating = service.generate(generation(9));
    let [prefill, decode] = &mut sessions[..] else {
        unreachable!()
    };
    let first = prefill.submit().await;
    let second = decode.submit().await;
    assert_eq!(first.leg(), Leg::Prefill);
    assert_eq!(second.leg(), Leg::Decode);
    assert_eq!(first.request_id, second.request_id);
    assert_eq!(first.peer.expect("a peer").engine_id, "e1");
    assert_eq!(second.peer.expect("a peer").kv_endpoint, "e0:1");
    let id = &first.request_id;
    let timings = LegTimings {
        queue_s: 0.5,
        prefill_s: 0.25,
        ..Default::default()
    };
    // The prefill leg's own end comes too late: the first token tells what it took.
    prefill.report(v1::StepReport {
        outputs: vec![v1::Output {
            request_id: id.clone(),
            tokens: vec![7],
            timings: Some(timings),
            ..Default::default()
        }],
        ..Default::default()
    });
    decode.output(id, 0, &[7], F::FinishNone);
    decode.output(id, 1, &[8, 9], F::FinishStop);
    let timings = LegTimings {
        transfer_s: 0.125,
        transfer_bytes: 4_096,
        ..Default::default()
    };
    decode.ended(id, R::LegEndFinished, timings);
    let heard = hear(generating).await;
    assert_eq!(heard.tokens, [7, 8, 9]);
    assert_eq!(heard.finish, Some(Finish::Stop));
    let timings = heard.end.expect("done");
    assert!(timings.queue >= Duration::from_millis(500));
    assert_eq!(timings.prefill, Duration::from_millis(250));
    assert_eq!(timings.transfer, Duration::from_millis(125));
    assert_eq!(timings.transfer_bytes, 4_096);
    assert_eq!(
        (
            timings.prefill_worker.as_str(),
            timings.decode_worker.as_str()
        ),
        ("0", "1")
    );
    assert_eq!(timings.replacements, 0);
    assert!(!timings.first_token.is_zero() && timings.total >= timings.first_token);

    until("the count", || {
        service
            .metrics_text()
            .contains("tasuki_requests_in_flight 0")
    })
    .await;
    let text = service.metrics_text();
    for line in [
        "tasuki_requests_total{outcome=\"done\"} 1",
        "tasuki_output_tokens_total 3",
        "tasuki_time_to_first_token_seconds_count 1",
        "tasuki_time_to_second_token_seconds_count 1",
        "tasuki_inter_token_latency_seconds_count 2",
        "tasuki_phase_seconds_count{phase=\"transfer\"} 1",
        "tasuki_worker_free_blocks{worker=\"0\",role=\"prefill\"} 100",
        "tasuki_worker_waiting{worker=\"1\",role=\"decode\"} 0",
        "tasuki_worker_prompt_tokens_computed_total{worker=\"1\",role=\"decode\"} 0",
        "# EOF",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn a_lost_decode_worker_is_made_good_by_the_other() {
    let roles = [Role::Prefill, Role::Decode, Role::Decode];
    let (service, _workers, mut sessions) = serve(&roles, |_| {}).await;
    let generating = service.generate(generation(4));
    let first = sessions[0].submit().await;
    let lost: usize = match first.peer.as_ref().expect("a peer").engine_id.as_str() {
        "e1" => 1,
        _ => 2,
    };
    let id = &first.request_id;
    sessions[0].output(id, 0, &[1], F::FinishNone);
    sessions[lost].submit().await;
    sessions[lost].output(id, 0, &[1, 2], F::FinishNone);
    sessions[0].ended(id, R::LegEndHandedOff, LegTimings::default());
    // The stream ends only after what was said on it.
    drop(sessions.remove(lost));
    let [prefill, left] = &mut sessions[..] else {
        unreachable!()
    };
    let again = prefill.submit().await;
    assert_eq!(again.resumed_tokens, [1, 2]);
    assert_ne!(again.request_id, *id);
    assert_eq!(left.submit().await.leg(), Leg::Decode);
    prefill.output(&again.request_id, 2, &[3], F::FinishNone);
    prefill.ended(&again.request_id, R::LegEndHandedOff, LegTimings::default());
    left.output(&again.request_id, 2, &[3, 4], F::FinishLength);
    left.ended(&again.request_id, R::LegEndFinished, LegTimings::default());
    let heard = hear(generating).await;
    assert_eq!(heard.tokens, [1, 2, 3, 4]);
    assert_eq!(heard.end.expect("done").replacements, 1);
    let setback = "tasuki_setbacks_total{reason=\"worker_lost\"} 1";
    assert!(service.metrics_text().contains(setback));
}

#[tokio::test]
async fn dropping_a_generation_aborts_both_legs() {
    let (service, _workers, mut sessions) = serve(&[Role::Prefill, Role::Decode], |_| {}).await;
    let generating = service.generate(generation(4));
    let mut ids = Vec::new();
    for session in &mut sessions {
        ids.push(session.submit().await.request_id);
    }
    drop(generating);
    for (session, id) in sessions.iter_mut().zip(ids) {
        let abort = session.abort().await;
        assert_eq!((abort.request_id, abort.choices), (id, vec![]));
    }
    until("the count", || {
        service
            .metrics_text()
            .contains("tasuki_requests_total{outcome=\"cancelled\"} 1")
    })
    .await;
}

#[tokio::test]
async fn a_stopped_choice_is_aborted_and_done_follows() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let mut generating = service.generate(generation(9));
    let submit = sessions[0].submit().await;
    assert_eq!(submit.leg(), Leg::Colocated);
    sessions[0].output(&submit.request_id, 0, &[1], F::FinishNone);
    assert!(matches!(
        soon("tokens", generating.next()).await,
        Some(Event::Tokens { .. })
    ));
    generating.stop(0);
    assert!(sessions[0].abort().await.choices.is_empty());
    sessions[0].ended(&submit.request_id, R::LegEndAborted, LegTimings::default());
    assert!(hear(generating).await.end.is_ok());
}

#[tokio::test]
async fn nobody_there_is_said_at_once() {
    let config = Config {
        // Nothing listens on a port that was just given back.
        workers: vec![FakeWorker::start().await.address.to_string()],
        ..Config::default()
    };
    let service = Service::start(config);
    assert!(service.limits().is_none());
    assert_eq!(service.readiness(), Err("no worker is up".to_owned()));
    let heard = hear(service.generate(generation(4))).await;
    let Err(ServeError::Unavailable {
        reason,
        retry_after_s,
    }) = heard.end
    else {
        panic!("{:?}", heard.end)
    };
    assert_eq!(reason, "no worker is up");
    assert!(retry_after_s > 0);
}

#[tokio::test]
async fn an_accepted_request_survives_a_restart_of_the_only_worker() {
    let (service, mut workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let generating = service.generate(generation(2));
    let id = sessions[0].submit().await.request_id;
    sessions[0].output(&id, 0, &[1], F::FinishNone);
    sessions.clear();
    let session = workers[0].session().await;
    session.say(Message::Info(info("another", Role::Mixed)));
    let mut session = session;
    let again = session.submit().await;
    assert_eq!(again.resumed_tokens, [1]);
    session.output(&again.request_id, 1, &[2], F::FinishLength);
    session.ended(&again.request_id, R::LegEndFinished, LegTimings::default());
    let heard = hear(generating).await;
    assert_eq!(heard.tokens, [1, 2]);
    assert!(heard.end.is_ok());
}

#[tokio::test]
async fn a_frozen_worker_gets_nothing_new_and_loses_what_it_has() {
    let short = |tuning: &mut Tuning| {
        tuning.liveness = Liveness {
            suspect_after: Duration::from_secs(1),
            lost_after: Duration::from_secs(3),
            ..Liveness::default()
        };
    };
    let (service, _workers, mut sessions) = serve(&[Role::Mixed, Role::Mixed], short).await;
    let heartbeat = |session: &Session| {
        session.report(v1::StepReport {
            load: Some(idle(Role::Mixed)),
            ..Default::default()
        });
    };
    let generating = service.generate(generation(1));
    let frozen = soon("a submit", async {
        let (left, right) = sessions.split_at_mut(1);
        tokio::select! {
            _ = left[0].next() => 0,
            _ = right[0].next() => 1,
        }
    })
    .await;
    let mut other = sessions.remove(1 - frozen);
    let answered = soon("the other one's submit", async {
        loop {
            tokio::select! {
                message = other.next() => break message,
                () = tokio::time::sleep(Duration::from_millis(20)) => heartbeat(&other),
            }
        }
    })
    .await;
    let Some(ToWorker::Submit(submit)) = answered else {
        panic!("{answered:?}")
    };
    assert!(submit.request_id.ends_with(".1"));
    other.output(&submit.request_id, 0, &[5], F::FinishLength);
    other.ended(&submit.request_id, R::LegEndFinished, LegTimings::default());
    assert_eq!(hear(generating).await.tokens, [5]);
}

#[tokio::test]
async fn time_counts_from_the_requests_arrival() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let tokenizing = Duration::from_secs(3);
    let mut request = generation(1);
    request.received -= tokenizing;
    let generating = service.generate(request);
    let id = sessions[0].submit().await.request_id;
    sessions[0].output(&id, 0, &[5], F::FinishLength);
    let timings = LegTimings {
        prefill_s: 0.25,
        ..Default::default()
    };
    sessions[0].ended(&id, R::LegEndFinished, timings);
    let timings = hear(generating).await.end.expect("done");
    assert!(timings.queue >= tokenizing, "{timings:?}");
    assert!(timings.first_token >= tokenizing && timings.total >= tokenizing);
    let text = service.metrics_text();
    let under = "tasuki_time_to_first_token_seconds_bucket{le=\"2.5\"} 0";
    assert!(text.contains(under), "{text}");
}

#[tokio::test]
async fn draining_lets_requests_finish_and_takes_no_new_ones() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let generating = service.generate(generation(1));
    let submit = sessions[0].submit().await;
    let drain = tokio::spawn({
        let service = service.clone();
        async move { service.drain(Duration::from_secs(60)).await }
    });
    until("draining", || service.readiness().is_err()).await;
    let refused = hear(service.generate(generation(1))).await;
    assert!(matches!(refused.end, Err(ServeError::Unavailable { .. })));
    assert!(!drain.is_finished());
    sessions[0].output(&submit.request_id, 0, &[5], F::FinishLength);
    sessions[0].ended(&submit.request_id, R::LegEndFinished, LegTimings::default());
    assert!(hear(generating).await.end.is_ok());
    soon("the drain", drain).await.expect("drained");
    assert!(sessions[0].next().await.is_none(), "the router hangs up");
}

#[tokio::test]
async fn draining_ends_what_does_not_finish() {
    let (service, _workers, mut sessions) = serve(&[Role::Mixed], |_| {}).await;
    let generating = service.generate(generation(1));
    let submit = sessions[0].submit().await;
    soon("the drain", service.drain(Duration::from_millis(10))).await;
    let heard = hear(generating).await;
    assert!(matches!(heard.end, Err(ServeError::Unavailable { .. })));
    assert_eq!(sessions[0].abort().await.request_id, submit.request_id);
}
