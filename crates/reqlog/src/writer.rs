//! Writes the log on a thread of its own. Requests hand over what they have to say through a
//! bounded queue and never wait: what finds it full is dropped and counted.
//!
//! The thread owns the files and the [`Sharing`]. Lines are gathered while the queue has more, and
//! appended together. If that fails, as on a full disk, they are dropped and counted, and the file
//! keeps what it has.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tasuki_core::Chunks;

use crate::files::{Files, Keep, OpenError};
use crate::format::{Fleet, Header, Line, Record, Router, VERSION};
use crate::sharing::Sharing;

/// Requests that may wait to be written.
const QUEUE: usize = 8_192;
/// How often the fleet is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Rates are told again when one of them has changed by this share.
const CHANGED: f64 = 0.1;
/// Tokens of KV in a step and of a prompt at which what is long is compared.
const LONG_KV: f64 = 65_536.0;
const LONG_PROMPT: f64 = 8_192.0;
/// Of one record, in bytes.
const LONGEST: usize = 512;
/// Lines that are gathered at most, in bytes.
const BATCH: usize = 256 << 10;

/// A request that is over.
pub struct Ended {
    /// Without `shares`.
    pub record: Record,
    /// Of its prompt.
    pub chunks: Chunks,
}

/// Why requests are missing from the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dropped {
    QueueFull,
    WriteFailed,
}

/// What the log asks of its router, from a thread of its own.
pub struct Hooks {
    /// The workers as they are now; [`Fleet::t`] is not read.
    pub fleet: Box<dyn Fn() -> Fleet + Send + Sync>,
    /// So many requests were dropped.
    pub dropped: Box<dyn Fn(Dropped, u64) + Send + Sync>,
}

enum Message {
    Ended(Box<Ended>),
    Close(SyncSender<()>),
}

/// The log of a router. Cheap to clone.
#[derive(Clone)]
pub struct RequestLog {
    sender: SyncSender<Message>,
    hooks: Arc<Hooks>,
    began: Instant,
    tenants: RandomState,
}

impl RequestLog {
    /// Opens the file and starts the thread.
    ///
    /// # Errors
    ///
    /// [`OpenError`].
    pub fn start(keep: Keep, router: Router, hooks: Hooks) -> Result<Self, OpenError> {
        Self::start_with(QUEUE, keep, router, hooks)
    }

    fn start_with(
        queue: usize,
        keep: Keep,
        router: Router,
        hooks: Hooks,
    ) -> Result<Self, OpenError> {
        let path = keep.path.clone();
        let files = Files::open(keep)?;
        let (sender, inbox) = sync_channel(queue);
        let (hooks, began) = (Arc::new(hooks), Instant::now());
        let unix = SystemTime::now().duration_since(UNIX_EPOCH);
        let header = Header {
            tasuki_request_log: VERSION,
            tasuki: env!("CARGO_PKG_VERSION").to_owned(),
            began_unix_s: (1e3 * unix.unwrap_or_default().as_secs_f64()).round() / 1e3,
            router,
        };
        let writer = Writer::new(files, inbox, Arc::clone(&hooks), header, began);
        let thread = thread::Builder::new().name("request-log".to_owned());
        let spawned = thread.spawn(move || writer.run());
        spawned.map_err(|source| OpenError::File { path, source })?;
        Ok(Self {
            sender,
            hooks,
            began,
            tenants: RandomState::new(),
        })
    }

    /// Takes a request that is over. Never waits.
    pub fn write(&self, ended: Ended) {
        let message = Message::Ended(Box::new(ended));
        match self.sender.try_send(message) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => (self.hooks.dropped)(Dropped::QueueFull, 1),
            Err(TrySendError::Disconnected(_)) => (self.hooks.dropped)(Dropped::WriteFailed, 1),
        }
    }

    /// Seconds since the log began.
    pub fn time_s(&self, at: Instant) -> f64 {
        at.saturating_duration_since(self.began).as_secs_f64()
    }

    /// What stands for a tenant's name; 0: it has none.
    pub fn tenant(&self, name: &str) -> u32 {
        if name.is_empty() {
            return 0;
        }
        (self.tenants.hash_one(name) as u32).max(1)
    }

    /// Writes what waits, and ends the log. Waits for it, no longer than `limit`.
    pub fn close(&self, limit: Duration) {
        let (done, closed) = sync_channel(1);
        let until = Instant::now() + limit;
        let mut message = Message::Close(done);
        while let Err(error) = self.sender.try_send(message) {
            match error {
                TrySendError::Full(back) if Instant::now() < until => message = back,
                _ => return,
            }
            thread::yield_now();
        }
        let _ = closed.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// The thread's state.
struct Writer {
    files: Files,
    inbox: Receiver<Message>,
    hooks: Arc<Hooks>,
    header: Header,
    began: Instant,
    /// The last fleet that was written.
    told: Fleet,
    sharing: Sharing,
    /// In the file, those in `lines` among them.
    records: u32,
    lines: Vec<u8>,
    /// Records in `lines`.
    pending: u32,
    failing: bool,
    /// When a new file is tried again, where none could be begun.
    rotate_at: Option<Instant>,
}

impl Writer {
    fn new(
        files: Files,
        inbox: Receiver<Message>,
        hooks: Arc<Hooks>,
        header: Header,
        began: Instant,
    ) -> Self {
        let mut writer = Self {
            files,
            inbox,
            hooks,
            header,
            began,
            told: Fleet::default(),
            sharing: Sharing::default(),
            records: 0,
            lines: Vec::new(),
            pending: 0,
            failing: false,
            rotate_at: None,
        };
        writer.put_header();
        writer
    }

    fn run(mut self) {
        let mut look = Instant::now();
        loop {
            if Instant::now() >= look {
                self.look(CHANGED);
                self.append();
                look = Instant::now() + LOOK;
            }
            let wait = look.saturating_duration_since(Instant::now());
            let mut next = match self.inbox.recv_timeout(wait) {
                Ok(message) => Some(message),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return self.end(),
            };
            while let Some(message) = next {
                match message {
                    Message::Ended(ended) => self.put(*ended),
                    Message::Close(done) => {
                        self.end();
                        drop(self); // the file's lock, which the next router may ask for at once
                        let _ = done.send(());
                        return;
                    }
                }
                next = self.inbox.try_recv().ok();
                if self.lines.len() >= BATCH {
                    self.append();
                }
            }
            self.append();
        }
    }

    fn end(&mut self) {
        self.look(0.0);
        self.append();
    }

    fn put(&mut self, ended: Ended) {
        let Ended { mut record, chunks } = ended;
        let is_due = self.rotate_at.is_none_or(|at| Instant::now() >= at);
        if self.records > 0 && is_due && self.files.is_full(self.lines.len() + LONGEST) {
            self.rotate();
        }
        if let Some((scheme, names)) = chunks.all().next() {
            let found = self.sharing.add(self.records, names);
            record.shares = found.map(|(holder, chunks)| {
                let tokens = chunks as u32 * scheme.chunk_tokens();
                (self.records - holder, tokens)
            });
        }
        record.round();
        // A worker that came and served since the last look.
        if record
            .workers
            .is_some_and(|(p, d)| !self.knows(p) || !self.knows(d))
        {
            self.look(CHANGED);
        }
        self.put_line(&Line::Record(Box::new(record)));
        self.records += 1;
        self.pending += 1;
    }

    fn knows(&self, id: u32) -> bool {
        self.told.workers.iter().any(|worker| worker.id == id)
    }

    fn put_header(&mut self) {
        // The values are plain: there is nothing that JSON could not say.
        if serde_json::to_writer(&mut self.lines, &self.header).is_ok() {
            self.lines.push(b'\n');
        }
    }

    fn put_line(&mut self, line: &Line) {
        if serde_json::to_writer(&mut self.lines, line).is_ok() {
            self.lines.push(b'\n');
        }
    }

    /// Writes the fleet if it is another than the one that was written last.
    fn look(&mut self, least_change: f64) {
        let fleet = (self.hooks.fleet)();
        if is_told(&self.told, &fleet, least_change) {
            return;
        }
        self.told = Fleet {
            t: (1e3 * self.began.elapsed().as_secs_f64()).round() / 1e3,
            ..fleet
        };
        let fleet = self.told.clone();
        self.put_line(&Line::Fleet { fleet });
    }

    fn rotate(&mut self) {
        self.append();
        if let Err(error) = self.files.rotate() {
            if self.rotate_at.replace(Instant::now() + LOOK).is_none() {
                tracing::warn!(%error, "the request log cannot begin a new file");
            }
            return;
        }
        self.rotate_at = None;
        self.sharing.clear();
        self.records = 0;
        self.put_header();
        let fleet = self.told.clone();
        self.put_line(&Line::Fleet { fleet });
    }

    fn append(&mut self) {
        if self.lines.is_empty() {
            return;
        }
        match self.files.append(&self.lines) {
            Ok(()) => self.failing = false,
            Err(error) => {
                if !std::mem::replace(&mut self.failing, true) {
                    tracing::warn!(%error, "the request log cannot be written; requests are missing from it");
                }
                (self.hooks.dropped)(Dropped::WriteFailed, u64::from(self.pending));
                // What is not in the file cannot be referred to, and the fleet is told again.
                self.sharing.clear();
                self.records -= self.pending;
                self.told = Fleet::default();
            }
        }
        self.lines.clear();
        self.pending = 0;
        if self.files.is_empty() {
            self.put_header(); // it was in the lines that are lost
        }
    }
}

/// Whether the workers are the same, and rates about the same.
fn is_told(told: &Fleet, fleet: &Fleet, least_change: f64) -> bool {
    let rates = |fleet: &Fleet| -> Vec<f64> {
        let classes = fleet.classes.iter();
        let of = classes.flat_map(|c| {
            [
                c.step_ms,
                c.sequence_us,
                c.prompt_step_ms,
                c.prompt_token_us,
                // What a token of KV adds and attention within a prompt count by what is long.
                c.step_ms + 1e-6 * c.kv_token_ns * LONG_KV,
                c.prompt_token_us + 1e-3 * c.prompt_square_ns * LONG_PROMPT,
            ]
        });
        of.collect()
    };
    let close = |(a, b): (f64, f64)| (a - b).abs() <= least_change * a.abs().max(b.abs());
    told.workers == fleet.workers
        && told.classes.len() == fleet.classes.len()
        && rates(told).into_iter().zip(rates(fleet)).all(close)
}

#[cfg(test)]
mod tests;
