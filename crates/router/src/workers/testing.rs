//! Workers for tests, which send what the test tells them: a real gRPC server, and one
//! inside the process.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tasuki_core::{Capabilities, ChunkScheme, HardwareClass, Identity, KvDomain, Role};
use tasuki_flow::fleet::WorkerInfo;
use tasuki_flow::{AdmissionConfig, LegSpec, Peer};
use tasuki_policy::PolicyConfig;
use tasuki_wire::v1::worker_server::{Worker, WorkerServer};
use tasuki_wire::v1::{self, router_message, worker_message};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::link::{NewLeg, WorkerLink};
use super::local_leg::LocalLeg;
use super::registry::Registry;

pub const TIME_LIMIT: Duration = Duration::from_secs(20);

/// Fails the test when something takes too long.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match timeout(TIME_LIMIT, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited too long for {what}"),
    }
}

/// Polls until a condition holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    soon(what, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// A registry that knows so many workers, none of them connected, of a router that has run for
/// a while.
pub fn registry(workers: usize) -> Arc<Registry> {
    let now = Instant::now();
    let registry = Registry::new(
        vec![Vec::new()],
        PolicyConfig::default(),
        AdmissionConfig::default(),
        now.checked_sub(Duration::from_secs(60)).unwrap_or(now),
    );
    for _ in 0..workers {
        registry.add("local:1");
    }
    Arc::new(registry)
}

/// A listening worker. Dropped: the port is closed, running sessions stay.
pub struct FakeWorker {
    pub address: SocketAddr,
    sessions: mpsc::UnboundedReceiver<Session>,
    server: JoinHandle<()>,
}

/// One router's stream, as the worker has it. Dropped: the stream ends.
pub struct Session {
    incoming: Streaming<v1::RouterMessage>,
    outgoing: mpsc::UnboundedSender<Result<v1::WorkerMessage, Status>>,
}

struct FakeService(mpsc::UnboundedSender<Session>);

#[tonic::async_trait]
impl Worker for FakeService {
    type ServeStream = Pin<Box<dyn Stream<Item = Result<v1::WorkerMessage, Status>> + Send>>;

    async fn serve(
        &self,
        request: Request<Streaming<v1::RouterMessage>>,
    ) -> Result<Response<Self::ServeStream>, Status> {
        let (outgoing, receiver) = mpsc::unbounded_channel();
        let session = Session {
            incoming: request.into_inner(),
            outgoing,
        };
        let _ = self.0.send(session);
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(
            receiver,
        ))))
    }
}

impl FakeWorker {
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().expect("an address")).await
    }

    /// Starts again at the address of one that ended.
    pub async fn start_at(address: SocketAddr) -> Self {
        Self::start_on(address, Server::builder()).await
    }

    /// With settings of its connections, such as certificates.
    pub async fn start_on(address: SocketAddr, mut server: Server) -> Self {
        let listener = TcpListener::bind(address).await.expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let (sender, sessions) = mpsc::unbounded_channel();
        let incoming = TcpIncoming::from(listener);
        let server = tokio::spawn(async move {
            let service = server.add_service(WorkerServer::new(FakeService(sender)));
            let _ = service.serve_with_incoming(incoming).await;
        });
        Self {
            address,
            sessions,
            server,
        }
    }

    /// The next stream of a router.
    pub async fn session(&mut self) -> Session {
        soon("a router", self.sessions.recv())
            .await
            .expect("a session")
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Session {
    pub fn send(&self, message: worker_message::Message) {
        let message = v1::WorkerMessage {
            message: Some(message),
        };
        // A router that is gone receives nothing.
        let _ = self.outgoing.send(Ok(message));
    }

    pub fn report(&self, report: v1::StepReport) {
        self.send(worker_message::Message::Step(report));
    }

    pub fn output(&self, attempt: &str, position: u32, tokens: &[u32], finish: v1::FinishReason) {
        self.report(v1::StepReport {
            outputs: vec![v1::Output {
                request_id: attempt.to_owned(),
                position,
                tokens: tokens.to_vec(),
                finish: finish.into(),
                ..Default::default()
            }],
            ..Default::default()
        });
    }

    pub fn ended(&self, attempt: &str, reason: v1::LegEndReason, timings: v1::LegTimings) {
        self.report(v1::StepReport {
            ended: vec![v1::LegEnd {
                request_id: attempt.to_owned(),
                reason: reason.into(),
                timings: Some(timings),
                ..Default::default()
            }],
            ..Default::default()
        });
    }

    /// The router's next message; `None` when it is gone.
    pub async fn next(&mut self) -> Option<router_message::Message> {
        let message = soon("the router's next message", self.incoming.message()).await;
        message.ok().flatten().and_then(|m| m.message)
    }

    pub async fn submit(&mut self) -> v1::Submit {
        match self.next().await {
            Some(router_message::Message::Submit(submit)) => submit,
            other => panic!("expected a submit, got {other:?}"),
        }
    }

    pub async fn abort(&mut self) -> v1::Abort {
        match self.next().await {
            Some(router_message::Message::Abort(abort)) => abort,
            other => panic!("expected an abort, got {other:?}"),
        }
    }
}

/// Information of a worker of 100 blocks that takes 1,024 tokens.
pub fn info(engine: &str, role: v1::Role) -> v1::WorkerInfo {
    v1::WorkerInfo {
        protocol_version: tasuki_wire::PROTOCOL_VERSION,
        engine_id: engine.to_owned(),
        role: Some(v1::RoleSetting {
            role: role.into(),
            owner: "start".to_owned(),
            epoch: 0,
        }),
        model: "tiny".to_owned(),
        identity: vec![7; 16],
        vocab_size: 512,
        max_model_len: 1_024,
        block_size: 16,
        num_blocks: 100,
        tensor_parallel_size: 1,
        kv_endpoint: format!("{engine}:1"),
        ..Default::default()
    }
}

/// A load report of an idle worker.
pub fn idle() -> v1::Load {
    v1::Load {
        free_blocks: 100,
        total_blocks: 100,
        ..Default::default()
    }
}

/// The link to a worker inside the process.
pub struct LocalLink(mpsc::UnboundedSender<ToWorker>);

/// A worker inside the process: what its link sent.
pub struct LocalWorker(mpsc::UnboundedReceiver<ToWorker>);

/// A message of a [`LocalLink`].
#[derive(Debug, PartialEq)]
pub enum ToWorker {
    Dispatch(String, u64, LegSpec),
    Abort(String, Vec<u32>),
    Retarget(String, Peer),
    SetRole(Role, u64),
    ResyncCache,
    FlushCache,
}

impl LocalWorker {
    pub fn new() -> (LocalLink, Self) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (LocalLink(sender), Self(receiver))
    }

    /// The next message that was sent already.
    pub fn received(&mut self) -> Option<ToWorker> {
        self.0.try_recv().ok()
    }
}

impl WorkerLink for LocalLink {
    fn dispatch(&self, leg: NewLeg<'_>, spec: LegSpec) -> Option<LocalLeg> {
        let message = ToWorker::Dispatch(leg.name.to_owned(), leg.slot.number, spec);
        let _ = self.0.send(message);
        None
    }

    fn abort(&self, name: &str, choices: Vec<u32>) {
        let _ = self.0.send(ToWorker::Abort(name.to_owned(), choices));
    }

    fn retarget(&self, name: &str, peer: Peer) {
        let _ = self.0.send(ToWorker::Retarget(name.to_owned(), peer));
    }

    fn set_role(&self, role: Role, _owner: &str, epoch: u64) {
        let _ = self.0.send(ToWorker::SetRole(role, epoch));
    }

    fn resync_cache(&self) {
        let _ = self.0.send(ToWorker::ResyncCache);
    }

    fn flush_cache(&self) -> bool {
        self.0.send(ToWorker::FlushCache).is_ok()
    }
}

/// Information of a worker inside the process: 100 blocks, up to 1,024 tokens.
pub fn local_info(engine: &str) -> WorkerInfo {
    WorkerInfo {
        peer: Peer {
            engine_id: engine.to_owned(),
            kv_endpoint: String::new(),
        },
        role: Role::Mixed,
        role_epoch: 0,
        role_owner: String::new(),
        model: "tiny".to_owned(),
        further_names: Vec::new(),
        adapters: Vec::new(),
        domain: KvDomain::default(),
        capabilities: Capabilities::default(),
        vocab_size: 512,
        max_model_len: 1_024,
        max_sequences: None,
        block_size: 16,
        num_blocks: 100,
        chunks: ChunkScheme::of_blocks(Identity::default(), 16),
        hardware: HardwareClass::default(),
    }
}
