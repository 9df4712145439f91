//! Keeps the gRPC stream to one worker: connect, listen, notice silence, connect again.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tasuki_core::WorkerId;
use tasuki_flow::WorkerKey;
use tasuki_flow::fleet::{JoinError, Silence};
use tasuki_wire::v1::worker_client::WorkerClient;
use tasuki_wire::v1::{self, worker_message::Message};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tonic::Code;

use super::connection::Joined;
use super::grpc_link::{self, MOST_BACKLOG_BYTES};
use super::registry::Registry;
use super::wire::{self, InfoError};
use crate::tls::fleet::{EndpointError, WorkerTransport, causes, is_misunderstanding};

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A refused port costs nothing to ask again, and a restarted worker rejoins at once.
const LONGEST_PAUSE_REFUSED: Duration = Duration::from_millis(200);
const MOST_MESSAGE_BYTES: usize = 64 << 20;
const WINDOW_BYTES: u32 = 4 << 20;

/// When a silent worker is suspected, and when it counts as lost.
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
    /// Nothing of a stream that has begun for so long, from a worker of another engine: the
    /// stream is given up. `None`: never.
    pub stalled: Option<Duration>,
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
            stalled: Some(Duration::from_secs(30)),
        }
    }
}

/// How workers are reached.
#[derive(Debug, Clone, Default)]
pub struct Dialling {
    pub liveness: Liveness,
    pub transport: WorkerTransport,
}

/// Why a connection did not come about or ended.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error("cannot connect: {}", with_causes(.0))]
    Connect(#[from] tonic::transport::Error),
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    #[error("{error}; {remedy}")]
    Misunderstood {
        error: Box<ConnectError>,
        remedy: &'static str,
    },
    #[error("the stream broke: {}", with_causes(.0))]
    Broken(#[from] tonic::Status),
    #[error("the worker ended the stream")]
    Ended,
    #[error("no first message for {0:?}")]
    NoHello(Duration),
    #[error("the first message is not the worker's information")]
    NotHello,
    #[error(transparent)]
    Info(#[from] InfoError),
    #[error(transparent)]
    Join(#[from] JoinError),
    #[error("another engine speaks on the stream now")]
    OtherEngine,
    #[error("no report for {0:?}")]
    Silent(Duration),
    #[error(
        "it does not read its messages: more than {} bytes of them wait",
        MOST_BACKLOG_BYTES
    )]
    NotReading,
}

impl ConnectError {
    fn is_refused(&self) -> bool {
        let ConnectError::Connect(error) = self else {
            return false;
        };
        causes(error).any(|cause| {
            let io = cause.downcast_ref::<io::Error>();
            io.is_some_and(|io| io.kind() == io::ErrorKind::ConnectionRefused)
        })
    }

    /// Whether it stays until settings change.
    fn needs_an_operator(&self) -> bool {
        match self {
            Self::Join(_) | Self::Info(_) | Self::Endpoint(_) | Self::Misunderstood { .. } => true,
            Self::Broken(status) => status.code() == Code::Unauthenticated,
            _ => false,
        }
    }

    /// Before the first message: the same, with what to do if certificates are the reason.
    fn before_hello(self, transport: &WorkerTransport) -> Self {
        let misunderstood = match &self {
            Self::Connect(error) => is_misunderstanding(error),
            Self::Broken(status) => is_misunderstanding(status),
            _ => false,
        };
        if !misunderstood {
            return self;
        }
        Self::Misunderstood {
            error: Box::new(self),
            remedy: transport.remedy(),
        }
    }
}

/// The messages of an error and of its causes, each once.
fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = String::new();
    for cause in causes(error).map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Runs until it is dropped, and the connection with it.
pub async fn keep_connected(
    worker: WorkerId,
    address: String,
    registry: Arc<Registry>,
    dialling: Dialling,
) -> Infallible {
    let mut stream = WorkerStream {
        worker,
        address,
        registry,
        dialling,
        key: None,
        is_ending: false,
    };
    let mut pause = FIRST_PAUSE;
    let mut logged = String::new();
    loop {
        let began = Instant::now();
        let Err(error) = stream.connect_and_listen().await;
        stream.registry.on_unreachable(worker);
        if stream.leave() {
            // One that joins and is lost at once, again and again, is no faster for it.
            if began.elapsed() >= LONGEST_PAUSE {
                pause = FIRST_PAUSE;
            }
            logged.clear();
            if stream.is_ending {
                tracing::info!(%worker, address = stream.address, "the worker has ended");
            } else {
                tracing::warn!(%worker, address = stream.address, %error, "worker lost");
            }
        } else if logged != error.to_string() {
            if error.needs_an_operator() {
                tracing::warn!(%worker, address = stream.address, %error, "worker refused");
            } else {
                tracing::info!(%worker, address = stream.address, %error, "worker not reached yet");
            }
            logged = error.to_string();
        }
        let longest = if error.is_refused() {
            LONGEST_PAUSE_REFUSED
        } else {
            LONGEST_PAUSE
        };
        sleep(pause.min(longest)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

struct WorkerStream {
    worker: WorkerId,
    address: String,
    registry: Arc<Registry>,
    dialling: Dialling,
    key: Option<WorkerKey>,
    /// Its last load says that it was told to end.
    is_ending: bool,
}

impl Drop for WorkerStream {
    fn drop(&mut self) {
        self.leave();
    }
}

impl WorkerStream {
    /// Whether there was a connection to leave.
    fn leave(&mut self) -> bool {
        let key = self.key.take();
        if let Some(key) = key {
            self.registry.leave(key);
        }
        key.is_some()
    }

    async fn connect_and_listen(&mut self) -> Result<Infallible, ConnectError> {
        let Dialling {
            liveness: limits,
            transport,
        } = &self.dialling;
        let channel = transport
            .endpoint(&self.address)?
            .connect_timeout(limits.connect)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(limits.ping_interval)
            .keep_alive_timeout(limits.ping_timeout)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(WINDOW_BYTES);
        let (link, outgoing, backlog) = grpc_link::link();
        let hello = async {
            let mut client = WorkerClient::new(channel.connect().await?)
                .max_decoding_message_size(MOST_MESSAGE_BYTES)
                .max_encoding_message_size(MOST_MESSAGE_BYTES);
            let mut incoming = client.serve(outgoing).await?.into_inner();
            let first = incoming.message().await?.ok_or(ConnectError::Ended)?;
            match first.message {
                Some(Message::Info(info)) => Ok((incoming, info)),
                _ => Err(ConnectError::NotHello),
            }
        };
        let (mut incoming, info) = timeout(limits.hello, hello)
            .await
            .map_err(|_| ConnectError::NoHello(limits.hello))?
            .map_err(|error| error.before_hello(transport))?;
        let admitted = wire::info(info.clone())?;
        let role = admitted.role;
        let joined = self
            .registry
            .join(self.worker, admitted, Arc::new(link), Instant::now())?;
        let key = joined.key;
        self.key = Some(key);
        self.is_ending = false;
        tracing::info!(
            worker = %self.worker,
            %role,
            engine = info.engine_id,
            address = self.address,
            max_model_len = info.max_model_len,
            num_blocks = info.num_blocks,
            "worker joins",
        );

        let mut silence_check =
            interval((self.dialling.liveness.suspect_after / 4).max(Duration::from_millis(10)));
        silence_check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                message = incoming.message() => {
                    self.on_message(&joined, message?.ok_or(ConnectError::Ended)?)?;
                }
                _ = silence_check.tick() => self.check_silence(key)?,
                () = backlog.exceeded() => return Err(ConnectError::NotReading),
            }
        }
    }

    fn on_message(
        &mut self,
        joined: &Joined,
        message: v1::WorkerMessage,
    ) -> Result<(), ConnectError> {
        match message.message {
            Some(Message::Step(report)) => {
                let is_ending = report
                    .load
                    .as_ref()
                    .map_or(self.is_ending, |load| load.draining);
                if is_ending && !self.is_ending {
                    let (worker, address) = (self.worker, &self.address);
                    tracing::info!(%worker, address, "the worker drains: it was told to end");
                }
                self.is_ending = is_ending;
                let report = wire::report(report);
                self.registry.on_report(joined, report, Instant::now());
            }
            Some(Message::Info(info)) => {
                let same = self.registry.on_info(joined.key, wire::info(info)?);
                return same.then_some(()).ok_or(ConnectError::OtherEngine);
            }
            // Of a later version, and optional by the protocol's rules.
            None => {}
        }
        Ok(())
    }

    fn check_silence(&self, key: WorkerKey) -> Result<(), ConnectError> {
        let Liveness {
            suspect_after,
            lost_after,
            ..
        } = self.dialling.liveness;
        let registry = &self.registry;
        match registry.check_silence(key, Instant::now(), suspect_after, lost_after) {
            Silence::Fine | Silence::Suspect => Ok(()),
            Silence::Lost => Err(ConnectError::Silent(lost_after)),
        }
    }
}
