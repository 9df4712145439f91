//! Keeps the stream to one worker: dial, listen, notice silence, dial again.

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tasuki_core::WorkerId;
use tasuki_wire::v1::worker_client::WorkerClient;
use tasuki_wire::v1::{self, worker_message::Message};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Endpoint;

use super::WorkerKey;
use super::registry::{JoinError, Registry, Silence};

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A refused port costs nothing to ask again, and a restarted worker rejoins at once.
const LONGEST_PAUSE_REFUSED: Duration = Duration::from_millis(200);
const MOST_MESSAGE_BYTES: usize = 64 << 20;
const WINDOW_BYTES: u32 = 4 << 20;

/// When a worker that says nothing is doubted, and when it is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Liveness {
    pub connect: Duration,
    /// For the worker's first message: it may be in the middle of a long step.
    pub hello: Duration,
    pub ping_interval: Duration,
    /// A machine that does not answer pings for so long is gone.
    pub ping_timeout: Duration,
    /// No report for so long: no new work. Workers report once a second at least.
    pub suspect_after: Duration,
    /// No report for so long: its requests go elsewhere.
    pub lost_after: Duration,
}

impl Default for Liveness {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            hello: Duration::from_secs(30),
            ping_interval: Duration::from_secs(2),
            ping_timeout: Duration::from_secs(8),
            suspect_after: Duration::from_secs(4),
            lost_after: Duration::from_secs(30),
        }
    }
}

/// Why a connection did not come about or ended.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error("cannot connect: {0}")]
    Connect(#[from] tonic::transport::Error),
    #[error("the stream broke: {0}")]
    Broken(#[from] tonic::Status),
    #[error("the worker ended the stream")]
    Ended,
    #[error("no first message for {0:?}")]
    NoHello(Duration),
    #[error("the first message is not the worker's information")]
    NotHello,
    #[error(transparent)]
    Join(#[from] JoinError),
    #[error("another engine speaks on the stream now")]
    OtherEngine,
    #[error("no report for {0:?}")]
    Silent(Duration),
}

impl LinkError {
    fn is_refused(&self) -> bool {
        let LinkError::Connect(error) = self else {
            return false;
        };
        let mut source = error.source();
        while let Some(error) = source {
            if let Some(error) = error.downcast_ref::<io::Error>() {
                return error.kind() == io::ErrorKind::ConnectionRefused;
            }
            source = error.source();
        }
        false
    }
}

/// Runs until `shutdown` turns true or its sender is gone.
pub async fn keep_connected(
    worker: WorkerId,
    address: String,
    registry: Arc<Registry>,
    liveness: Liveness,
    mut shutdown: watch::Receiver<bool>,
) {
    let mut link = Link {
        worker,
        address,
        registry,
        liveness,
        key: None,
    };
    let mut pause = FIRST_PAUSE;
    let mut said = String::new();
    loop {
        let outcome = tokio::select! {
            outcome = link.connect_and_listen() => outcome,
            _ = shutdown.wait_for(|&down| down) => return,
        };
        let Err(error) = outcome;
        link.registry.miss(worker);
        if link.leave() {
            pause = FIRST_PAUSE;
            tracing::warn!(%worker, address = link.address, %error, "worker lost");
        } else if said != error.to_string() {
            if matches!(error, LinkError::Join(_)) {
                tracing::warn!(%worker, address = link.address, %error, "worker refused");
            } else {
                tracing::info!(%worker, address = link.address, %error, "worker not reached yet");
            }
            said = error.to_string();
        }
        let longest = if error.is_refused() {
            LONGEST_PAUSE_REFUSED
        } else {
            LONGEST_PAUSE
        };
        tokio::select! {
            () = sleep(pause.min(longest)) => {}
            _ = shutdown.wait_for(|&down| down) => return,
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

struct Link {
    worker: WorkerId,
    address: String,
    registry: Arc<Registry>,
    liveness: Liveness,
    key: Option<WorkerKey>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Link {
    /// Whether there was a connection to leave.
    fn leave(&mut self) -> bool {
        let key = self.key.take();
        if let Some(key) = key {
            self.registry.leave(key);
        }
        key.is_some()
    }

    async fn connect_and_listen(&mut self) -> Result<std::convert::Infallible, LinkError> {
        let limits = self.liveness;
        let channel = Endpoint::from_shared(format!("http://{}", self.address))?
            .connect_timeout(limits.connect)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(limits.ping_interval)
            .keep_alive_timeout(limits.ping_timeout)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES)
            .connect()
            .await?;
        let mut client = WorkerClient::new(channel)
            .max_decoding_message_size(MOST_MESSAGE_BYTES)
            .max_encoding_message_size(MOST_MESSAGE_BYTES);
        let (sender, receiver) = mpsc::unbounded_channel();
        let hello = async {
            let outgoing = UnboundedReceiverStream::new(receiver);
            let mut incoming = client.serve(outgoing).await?.into_inner();
            let first = incoming.message().await?.ok_or(LinkError::Ended)?;
            match first.message {
                Some(Message::Info(info)) => Ok((incoming, info)),
                _ => Err(LinkError::NotHello),
            }
        };
        let (mut incoming, info) = timeout(limits.hello, hello)
            .await
            .map_err(|_| LinkError::NoHello(limits.hello))??;
        let key = self
            .registry
            .join(self.worker, info.clone(), sender, Instant::now())?;
        self.key = Some(key);
        tracing::info!(
            worker = %self.worker,
            role = %info.role().as_str_name(),
            engine = info.engine_id,
            address = self.address,
            max_model_len = info.max_model_len,
            num_blocks = info.num_blocks,
            "worker joins",
        );

        let mut watchman = interval((limits.suspect_after / 4).max(Duration::from_millis(10)));
        watchman.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = incoming.message() => {
                    self.hear(key, message?.ok_or(LinkError::Ended)?)?;
                }
                _ = watchman.tick() => self.judge(key)?,
            }
        }
    }

    fn hear(&self, key: WorkerKey, message: v1::WorkerMessage) -> Result<(), LinkError> {
        match message.message {
            Some(Message::Step(report)) => self.registry.report(key, report, Instant::now()),
            Some(Message::Info(info)) => {
                let same = self.registry.update_info(key, info)?;
                return same.then_some(()).ok_or(LinkError::OtherEngine);
            }
            // Of a later version, and optional by the protocol's rules.
            None => {}
        }
        Ok(())
    }

    fn judge(&self, key: WorkerKey) -> Result<(), LinkError> {
        let Liveness {
            suspect_after,
            lost_after,
            ..
        } = self.liveness;
        let now = Instant::now();
        match self
            .registry
            .judge_silence(key, now, suspect_after, lost_after)
        {
            Silence::Fine | Silence::Suspect => Ok(()),
            Silence::Lost => Err(LinkError::Silent(lost_after)),
        }
    }
}
