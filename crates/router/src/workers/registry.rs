//! All workers at one place: placement reads it, links write it, requests send through it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tasuki_core::{Health, Identity, RequestView, WorkerId, WorkerView};
use tasuki_policy::{NoPlacement, PolicyConfig, place, place_decode};
use tasuki_wire::v1;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;

use super::slot::{Connection, Slot};
use super::{Mail, Seat, WorkerKey};

/// Why a worker is not taken in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    #[error(
        "the worker speaks protocol version {theirs}, this router {ours}: run one version of both"
    )]
    Protocol { theirs: u32, ours: u32 },
    #[error("the worker's identity has {0} bytes instead of 16")]
    Identity(usize),
    #[error("the worker is already connected as worker {0}: it is listed twice")]
    Twice(WorkerId),
    #[error(
        "the worker serves {theirs:?}, worker {worker} serves {ours:?}: one router serves one \
         model, which it keeps until it is restarted"
    )]
    OtherModel {
        theirs: String,
        worker: WorkerId,
        ours: String,
    },
}

/// Why the router does not want requests yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    #[error("{waiting} of {workers} workers have not answered yet")]
    Starting { waiting: usize, workers: usize },
    #[error(transparent)]
    NoPlacement(#[from] NoPlacement),
}

/// Readiness waits so long for every worker's first answer: with some of them only,
/// the first requests would be placed on workers of the wrong role.
const FIRST_ANSWERS: Duration = Duration::from_secs(2);

/// What a worker's silence means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    Fine,
    Suspect,
    Lost,
}

/// Every configured worker, connected or not.
pub struct Registry {
    began: Instant,
    slots: Mutex<Vec<Slot>>,
    policy: PolicyConfig,
    next_connection: AtomicU64,
    tie: AtomicU64,
    changes: watch::Sender<u64>,
}

impl Registry {
    pub fn new(workers: usize, policy: PolicyConfig, now: Instant) -> Self {
        let ids = (0u32..).take(workers).map(WorkerId);
        Self {
            began: now,
            slots: Mutex::new(ids.map(|id| Slot::new(id, now)).collect()),
            policy,
            next_connection: AtomicU64::new(0),
            tie: AtomicU64::new(0),
            changes: watch::Sender::new(0),
        }
    }

    /// Changes whenever a worker joins or recovers.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Takes a worker in after its first message.
    pub fn join(
        &self,
        worker: WorkerId,
        info: v1::WorkerInfo,
        messages: UnboundedSender<v1::RouterMessage>,
        now: Instant,
    ) -> Result<WorkerKey, JoinError> {
        let identity = check(&info)?;
        let mut slots = self.lock();
        let twin = slots.iter().find(|slot| {
            let known = slot.info.as_ref().map(|known| &known.engine_id);
            slot.connection.is_some() && known == Some(&info.engine_id)
        });
        if let Some(twin) = twin {
            return Err(JoinError::Twice(twin.view.id));
        }
        refuse_other_model(&slots, &info, identity)?;
        let serial = self.next_connection.fetch_add(1, Ordering::Relaxed);
        let slot = &mut slots[worker.0 as usize];
        slot.set_info(info, identity);
        let connection = Connection {
            serial,
            messages,
            legs: HashMap::new(),
        };
        slot.connect(connection, now);
        drop(slots);
        self.announce_change();
        Ok(WorkerKey {
            worker,
            connection: serial,
        })
    }

    /// Notes that an attempt to reach the worker has failed.
    pub fn miss(&self, worker: WorkerId) {
        self.lock()[worker.0 as usize].was_asked = true;
    }

    /// Takes over changed information. False: it is another engine now.
    pub fn update_info(&self, key: WorkerKey, info: v1::WorkerInfo) -> Result<bool, JoinError> {
        let identity = check(&info)?;
        let same = self.with(key, |slot| {
            let same = slot
                .info
                .as_ref()
                .is_some_and(|i| i.engine_id == info.engine_id);
            if same {
                slot.set_info(info, identity);
            }
            same
        });
        self.announce_change();
        Ok(same.unwrap_or(false))
    }

    /// Distributes a report among the requests that it is about.
    pub fn report(&self, key: WorkerKey, report: v1::StepReport, now: Instant) {
        let recovered = self.with(key, |slot| {
            slot.last_heard = now;
            if let Some(load) = report.load {
                slot.take_load(load);
            }
            let Some(connection) = &mut slot.connection else {
                return false;
            };
            for output in report.outputs {
                if let Some(leg) = connection.legs.get_mut(&output.request_id) {
                    leg.heard();
                    // A task that is gone has sent its aborts.
                    let _ = leg.mail.send(Mail::Output(key, output));
                }
            }
            for ended in report.ended {
                if let Some(leg) = connection.legs.remove(&ended.request_id) {
                    let _ = leg.mail.send(Mail::Ended(key, ended));
                }
            }
            slot.recount();
            std::mem::replace(&mut slot.view.health, Health::Ready) != Health::Ready
        });
        if recovered == Some(true) {
            self.announce_change();
        }
    }

    /// The connection is over: its legs are no more.
    pub fn leave(&self, key: WorkerKey) {
        let connection = self.with(key, |slot| {
            slot.view.health = Health::Down;
            slot.load = None;
            let connection = slot.connection.take();
            slot.recount();
            connection
        });
        for leg in connection
            .flatten()
            .into_iter()
            .flat_map(|c| c.legs.into_values())
        {
            let _ = leg.mail.send(Mail::Lost(key));
        }
    }

    /// Judges how long a worker has said nothing; a silent one gets no new work.
    pub fn judge_silence(
        &self,
        key: WorkerKey,
        now: Instant,
        suspect_after: Duration,
        lost_after: Duration,
    ) -> Silence {
        let judged = self.with(key, |slot| {
            let silent = now.saturating_duration_since(slot.last_heard);
            if silent >= lost_after {
                Silence::Lost
            } else if silent >= suspect_after {
                slot.view.health = Health::Suspect;
                Silence::Suspect
            } else {
                Silence::Fine
            }
        });
        judged.unwrap_or(Silence::Lost)
    }

    /// Starts a leg. False: the connection is gone.
    pub fn submit(&self, key: WorkerKey, submit: v1::Submit, mail: &UnboundedSender<Mail>) -> bool {
        let sent = self.with(key, |slot| {
            let leg = slot.new_leg(&submit, mail.clone());
            let Some(connection) = &mut slot.connection else {
                return false;
            };
            connection.legs.insert(submit.request_id.clone(), leg);
            let message = v1::router_message::Message::Submit(submit);
            // A closed channel means that the link is about to report the loss.
            let _ = connection.messages.send(wrap(message));
            slot.recount();
            true
        });
        sent.unwrap_or(false)
    }

    /// Sends a message about a leg; lost with the connection when that is gone.
    pub fn send(&self, key: WorkerKey, message: v1::router_message::Message) {
        self.with(key, |slot| {
            if let Some(connection) = &slot.connection {
                let _ = connection.messages.send(wrap(message));
            }
        });
    }

    /// Chooses the two seats of a request; the same one twice when it stays whole.
    pub fn place(&self, request: &RequestView) -> Result<(Seat, Seat), NoPlacement> {
        let tie = self.tie.fetch_add(1, Ordering::Relaxed);
        let slots = self.lock();
        let placement = place(&views(&slots), request, &self.policy, tie)?;
        let seats = (
            seat(&slots, placement.prefill),
            seat(&slots, placement.decode),
        );
        match seats {
            (Some(prefill), Some(decode)) => Ok((prefill, decode)),
            _ => Err(NoPlacement::NoWorker),
        }
    }

    /// Chooses another decode worker for a prefill that `prefill` holds.
    pub fn place_decode(
        &self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<Seat> {
        let tie = self.tie.fetch_add(1, Ordering::Relaxed);
        let slots = self.lock();
        let views = views(&slots);
        let id = place_decode(&views, request, prefill.worker, tried, &self.policy, tie)?;
        seat(&slots, id)
    }

    /// Whether a request could be placed now, without placing one, and every worker
    /// has answered, could not be reached or was given its time.
    ///
    /// The placement is tried on a copy of the workers' state: requests and reports do not
    /// wait for it.
    pub fn readiness(&self, now: Instant) -> Result<(), NotReady> {
        let (views, waiting) = self.read(|slots| {
            let waiting = slots.iter().filter(|slot| !slot.was_asked).count();
            (views(slots), waiting)
        });
        place(&views, &RequestView::new(1, 2), &self.policy, 0)?;
        if waiting > 0 && now.saturating_duration_since(self.began) < FIRST_ANSWERS {
            let workers = self.read(<[Slot]>::len);
            return Err(NotReady::Starting { waiting, workers });
        }
        Ok(())
    }

    /// Aborts the legs whose request has no task any more. Returns how many there were.
    pub fn abort_orphans(&self) -> usize {
        let mut aborted = 0;
        for slot in self.lock().iter_mut() {
            let Some(connection) = &mut slot.connection else {
                continue;
            };
            connection.legs.retain(|request_id, leg| {
                if leg.mail.is_closed() {
                    let abort = v1::router_message::Message::Abort(v1::Abort {
                        request_id: request_id.clone(),
                        choices: Vec::new(),
                    });
                    // A closed channel means that the worker is lost, and its legs with it.
                    let _ = connection.messages.send(wrap(abort));
                    aborted += 1;
                }
                !leg.mail.is_closed()
            });
            slot.recount();
        }
        aborted
    }

    /// Reads every slot, for metrics and limits.
    pub fn read<T>(&self, read: impl FnOnce(&[Slot]) -> T) -> T {
        read(&self.lock())
    }

    fn with<T>(&self, key: WorkerKey, change: impl FnOnce(&mut Slot) -> T) -> Option<T> {
        let mut slots = self.lock();
        let slot = slots.get_mut(key.worker.0 as usize)?;
        let serial = slot.connection.as_ref()?.serial;
        (serial == key.connection).then(|| change(slot))
    }

    fn announce_change(&self) {
        self.changes.send_modify(|version| *version += 1);
    }

    /// A panic elsewhere leaves the slots usable: every change is complete in itself.
    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn check(info: &v1::WorkerInfo) -> Result<Identity, JoinError> {
    if info.protocol_version != tasuki_wire::PROTOCOL_VERSION {
        return Err(JoinError::Protocol {
            theirs: info.protocol_version,
            ours: tasuki_wire::PROTOCOL_VERSION,
        });
    }
    Identity::from_slice(&info.identity).ok_or(JoinError::Identity(info.identity.len()))
}

/// What one model began, another cannot go on with, and the router has the text
/// of one: that of the workers seen so far, whether or not they are there. Equal
/// names or equal identities prove it, for one model may have two names, and
/// dtypes differ in identity.
fn refuse_other_model(
    slots: &[Slot],
    info: &v1::WorkerInfo,
    identity: Identity,
) -> Result<(), JoinError> {
    let mut known = slots
        .iter()
        .filter_map(|slot| Some((&slot.view, slot.info.as_ref()?)));
    let Some((view, first)) = known.clone().next() else {
        return Ok(());
    };
    if known.any(|(view, known)| view.identity == identity || known.model == info.model) {
        return Ok(());
    }
    Err(JoinError::OtherModel {
        theirs: info.model.clone(),
        worker: view.id,
        ours: first.model.clone(),
    })
}

/// Workers that were ever connected.
fn views(slots: &[Slot]) -> Vec<WorkerView> {
    let known = slots.iter().filter(|slot| slot.info.is_some());
    known.map(|slot| slot.view.clone()).collect()
}

fn seat(slots: &[Slot], worker: WorkerId) -> Option<Seat> {
    let slot = &slots[worker.0 as usize];
    let info = slot.info.as_ref()?;
    Some(Seat {
        key: WorkerKey {
            worker,
            connection: slot.connection.as_ref()?.serial,
        },
        peer: v1::Peer {
            engine_id: info.engine_id.clone(),
            kv_endpoint: info.kv_endpoint.clone(),
        },
    })
}

fn wrap(message: v1::router_message::Message) -> v1::RouterMessage {
    v1::RouterMessage {
        message: Some(message),
    }
}
