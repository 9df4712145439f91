//! The service over real streams to workers that send what the test tells them.

mod access_log;
mod admission;
mod choices;
mod draining;
mod losses;
mod membership;
mod metrics_page;
mod parity;
pub mod request_log;
mod requests;
#[cfg(feature = "otel")]
mod traces;
mod upgrade;

use std::time::{Duration, Instant};

use tasuki_core::ModelId;
use tasuki_flow::SamplingParams;
use tasuki_policy::NoPlacement;
use tasuki_wire::v1::router_message::Message as ToWorker;
use tasuki_wire::v1::worker_message::Message;
use tasuki_wire::v1::{self, FinishReason as F, Leg, LegEndReason as R, LegTimings, Role};

use super::Service;
use super::api::{Event, Finish, Generating, Generation, ServeError, Timings, Unready};
use super::config::{Config, Tuning};
use crate::discovery::StaticList;
use crate::workers::Liveness;
use crate::workers::testing::{FakeWorker, Session, idle, info, soon, until};

fn generation(max_tokens: u32) -> Generation {
    Generation {
        model: ModelId(0),
        request_id: "r".to_owned(),
        prompt: (0..20).collect(),
        n: 1,
        sampling: SamplingParams {
            max_tokens,
            ..Default::default()
        },
        cache_salt: String::new(),
        tenant: "".into(),
        priority: 0,
        opaque: None,
    }
}

/// What readiness is where no request finds a placement.
fn no_placement(reason: NoPlacement) -> Result<(), Unready> {
    Err(Unready::Workers(reason.into()))
}

/// Short requests are split too.
fn by_role(tuning: &mut Tuning) {
    tuning.policy.strict_roles = true;
}

/// A service with one connected fake worker for each role.
async fn serve(
    roles: &[Role],
    tune: impl FnOnce(&mut Tuning),
) -> (Service, Vec<FakeWorker>, Vec<Session>) {
    let infos = roles.iter().enumerate();
    let infos = infos.map(|(at, &role)| info(&format!("e{at}"), role));
    serve_workers(infos.collect(), tune).await
}

/// A service with fake workers that say this of themselves.
async fn serve_workers(
    infos: Vec<v1::WorkerInfo>,
    tune: impl FnOnce(&mut Tuning),
) -> (Service, Vec<FakeWorker>, Vec<Session>) {
    let count = infos.len();
    let mut workers = Vec::new();
    for _ in &infos {
        workers.push(FakeWorker::start().await);
    }
    let addresses = workers.iter().map(|w| w.address.to_string());
    let list = StaticList(addresses.collect());
    let mut tuning = Tuning::from(&Config::default());
    tune(&mut tuning);
    let service = Service::start_tuned(vec![Vec::new()], vec![Box::new(list)], tuning);
    let mut sessions = Vec::new();
    for (worker, info) in workers.iter_mut().zip(infos) {
        let session = worker.session().await;
        session.send(Message::Info(info));
        sessions.push(session);
    }
    until("all workers", || {
        for session in &sessions {
            session.report(v1::StepReport {
                load: Some(idle()),
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
        up.count() == count && known.count() == count
    })
    .await;
    (service, workers, sessions)
}

struct Received {
    tokens: Vec<u32>,
    finish: Option<Finish>,
    end: Result<Timings, ServeError>,
}

async fn read_all(mut generating: Generating) -> Received {
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
            Event::PromptLogprobs(_) | Event::Frame { .. } => panic!("nobody asked"),
            Event::Done(timings) => {
                let end = Ok(*timings);
                return Received {
                    tokens,
                    finish,
                    end,
                };
            }
            Event::Failed(error) => {
                let end = Err(error);
                return Received {
                    tokens,
                    finish,
                    end,
                };
            }
        }
    }
}
