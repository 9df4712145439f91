//! The load: sends every request when it is due, or when a user is free, and
//! gathers the answers.
//!
//! One task decides (this one); every request in flight has a task of its own.
//! Due times are kept apart from sending times: what waits for a place under
//! `max_concurrency` is late, and it shows.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, stream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::arrivals::{Arrival, Schedule};
use crate::client::{Answer, Client, Failure, Stop};
use crate::pacer::Pacer;
use crate::plan::{Planned, Workload};
use crate::recorder::Sent;

/// So much is made before the run.
const AHEAD_REQUESTS: usize = 50_000;
const AHEAD_BYTES: usize = 100 << 20;

/// Of a user of a closed loop who could not connect. Without it a server that is gone would get
/// thousands of requests a second, and each of them would be kept as a failure.
const PAUSE: Duration = Duration::from_millis(100);

/// Everything that a load is made of.
pub struct Load {
    pub client: Arc<Client>,
    pub workload: Box<dyn Workload>,
    pub arrival: Arrival,
    /// Of the arrivals.
    pub seed: u64,
    /// Nothing is due after this time.
    pub duration: Option<Duration>,
    pub pacer: Pacer,
    pub stop: Stop,
}

/// What came of a load.
pub struct Sending {
    pub start: Instant,
    /// In the order in which they were over.
    pub answers: Vec<(Sent, Answer)>,
    /// When the last request was due.
    pub last_due: Instant,
    pub interrupted: bool,
}

impl Load {
    /// Makes the first requests, so that making them disturbs no sending.
    pub fn ready(self) -> ReadyLoad {
        ReadyLoad(Running::new(self))
    }

    /// Sends requests at once, `at_once` of them in flight; the first failure ends it.
    ///
    /// # Errors
    /// That failure.
    pub async fn send_unmeasured(
        client: &Arc<Client>,
        requests: &mut (dyn Iterator<Item = Planned> + Send),
        at_once: usize,
        stop: &Stop,
    ) -> Result<(), Failure> {
        let mut answers = stream::iter(requests)
            .map(|planned| {
                let (client, stop) = (Arc::clone(client), stop.clone());
                async move { client.ask(&planned, Instant::now(), stop).await }
            })
            .buffer_unordered(at_once);
        while let Some(answer) = answers.next().await {
            if let Some(failure) = answer.failure {
                return Err(failure);
            }
        }
        Ok(())
    }
}

/// A load that waits for nothing but its start.
pub struct ReadyLoad(Running);

impl ReadyLoad {
    /// Sends everything and waits for all answers, or for the stop.
    pub async fn run(self) -> Sending {
        self.0.run().await
    }
}

/// Something that is due.
struct Due {
    at: Instant,
    /// Keeps the order of what is due at the same moment.
    number: u64,
    what: What,
}

enum What {
    /// A request of the schedule; the next one is scheduled with it.
    Scheduled(Planned),
    /// What follows an answer.
    Next(Planned),
    /// A user of a closed loop begins.
    User,
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Due {}

struct Running {
    client: Arc<Client>,
    workload: Box<dyn Workload>,
    ahead: VecDeque<Planned>,
    arrival: Arrival,
    schedule: Schedule,
    pacer: Pacer,
    stop: Stop,
    start: Instant,
    duration: Option<Duration>,
    end_of_offers: Option<Instant>,
    due: BinaryHeap<Reverse<Due>>,
    dues: u64,
    places: Option<Arc<Semaphore>>,
    in_flight: usize,
    sender: UnboundedSender<Option<(Sent, Answer)>>,
    receiver: UnboundedReceiver<Option<(Sent, Answer)>>,
    answers: Vec<(Sent, Answer)>,
    last_due: Instant,
}

impl Running {
    fn new(mut load: Load) -> Self {
        let mut ahead = VecDeque::new();
        let mut bytes = 0;
        while ahead.len() < AHEAD_REQUESTS && bytes < AHEAD_BYTES {
            let Some(planned) = load.workload.next() else {
                break;
            };
            bytes += planned.prompt.size_bytes();
            ahead.push_back(planned);
        }
        let (sender, receiver) = unbounded_channel();
        // A user of a closed loop is its own limit.
        let limit = load
            .arrival
            .max_concurrency
            .filter(|_| !load.arrival.is_closed());
        let start = Instant::now();
        Self {
            client: load.client,
            workload: load.workload,
            ahead,
            arrival: load.arrival,
            schedule: Schedule::new(load.arrival, load.seed),
            pacer: load.pacer,
            stop: load.stop,
            start,
            duration: load.duration,
            end_of_offers: None,
            due: BinaryHeap::new(),
            dues: 0,
            places: limit.map(|limit| Arc::new(Semaphore::new(limit))),
            in_flight: 0,
            sender,
            receiver,
            answers: Vec::new(),
            last_due: start,
        }
    }

    async fn run(mut self) -> Sending {
        self.start = Instant::now();
        self.last_due = self.start;
        self.end_of_offers = self.duration.map(|duration| self.start + duration);
        if self.arrival.is_closed() {
            for user in 0..self.arrival.max_concurrency.unwrap_or(1) {
                self.plan(self.start + self.arrival.user_start(user), What::User);
            }
        } else {
            self.schedule_next();
        }
        let mut stop = self.stop.clone();
        while self.in_flight > 0 || !self.due.is_empty() {
            let next = self.due.peek().map(|Reverse(due)| due.at);
            let pacer = &self.pacer;
            let on_time = async {
                match next {
                    Some(at) => pacer.until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => break,
                () = on_time => self.send_due(),
                over = self.receiver.recv() => self.over(over.flatten()),
            }
        }
        self.finish().await
    }

    /// After a stop: requests in flight end at once, and say what they have seen.
    async fn finish(mut self) -> Sending {
        let interrupted = *self.stop.borrow();
        while self.in_flight > 0 {
            let over = self.receiver.recv().await.flatten();
            self.in_flight -= 1;
            self.answers.extend(over);
        }
        Sending {
            start: self.start,
            answers: self.answers,
            last_due: self.last_due,
            interrupted,
        }
    }

    fn plan(&mut self, at: Instant, what: What) {
        if self.end_of_offers.is_none_or(|end| at < end) {
            let number = self.dues;
            self.dues += 1;
            self.due.push(Reverse(Due { at, number, what }));
        }
    }

    fn next_request(&mut self) -> Option<Planned> {
        let next = self.ahead.pop_front();
        next.or_else(|| self.workload.next())
    }

    fn schedule_next(&mut self) {
        if let Some(planned) = self.next_request() {
            let after = self.schedule.due(&planned).unwrap_or_default();
            self.plan(self.start + after, What::Scheduled(planned));
        }
    }

    /// Sends whatever is due by now.
    fn send_due(&mut self) {
        while let Some(Due { at, what, .. }) = self.pop_due() {
            match what {
                What::Scheduled(planned) => {
                    self.send(planned, at);
                    self.schedule_next();
                }
                What::Next(planned) => self.send(planned, at),
                What::User => self.send_user(at),
            }
        }
    }

    fn pop_due(&mut self) -> Option<Due> {
        let next = self.due.peek_mut()?;
        let is_due = next.0.at <= Instant::now();
        is_due.then(|| PeekMut::pop(next).0)
    }

    /// A user of a closed loop is free since `at`.
    fn send_user(&mut self, at: Instant) {
        if self.end_of_offers.is_none_or(|end| at < end)
            && let Some(planned) = self.next_request()
        {
            self.send(planned, at);
        }
    }

    fn send(&mut self, planned: Planned, due: Instant) {
        self.in_flight += 1;
        self.last_due = self.last_due.max(due);
        let client = Arc::clone(&self.client);
        let places = self.places.clone();
        let mut stop = self.stop.clone();
        let sender = self.sender.clone();
        tokio::spawn(async move {
            let place = match places {
                None => None,
                Some(places) => tokio::select! {
                    biased;
                    _ = stop.wait_for(|stop| *stop) => {
                        let _ = sender.send(None); // never sent
                        return;
                    }
                    place = places.acquire_owned() => place.ok(),
                },
            };
            let answer = client.ask(&planned, due, stop).await;
            drop::<Option<OwnedSemaphorePermit>>(place);
            let _ = sender.send(Some((Sent::new(&planned, due), answer)));
        });
    }

    fn over(&mut self, over: Option<(Sent, Answer)>) {
        self.in_flight -= 1;
        let Some((sent, mut answer)) = over else {
            return;
        };
        let follows = match answer.failure {
            None => self.workload.answered(sent.index, &answer.text),
            Some(_) => None,
        };
        if answer.usage.is_some() {
            (answer.text, answer.reasoning) = Default::default(); // nobody needs them any more
        }
        match follows {
            Some((thinking, planned)) => self.plan(answer.end + thinking, What::Next(planned)),
            None if self.arrival.is_closed() && is_gone(&answer) => {
                self.plan(answer.end + PAUSE, What::User);
            }
            None if self.arrival.is_closed() => self.send_user(answer.end),
            None => {}
        }
        self.answers.push((sent, answer));
    }
}

/// Whether nobody listens where the request went.
fn is_gone(answer: &Answer) -> bool {
    use Failure as F;
    matches!(
        answer.failure,
        Some(F::Refused { .. } | F::Connect { .. } | F::ConnectTimeout { .. })
    )
}
