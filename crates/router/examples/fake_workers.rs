//! Workers without an engine, to measure the router: they speak the workers' protocol.
//!
//! Every request gets its first token at once and one more each step. Token ids are those of
//! the prompt, in turn, so text comes out of them. What a request asks for beyond its number
//! of tokens is ignored. Prints `worker HOST:PORT` for each; ends with its standard input.

use std::collections::HashMap;
use std::io::Read;
use std::pin::Pin;
use std::time::Duration;

use clap::Parser;
use tasuki_wire::v1::worker_server::{Worker, WorkerServer};
use tasuki_wire::v1::{self, router_message, worker_message};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

const BLOCK_TOKENS: u32 = 32;
const BLOCKS: u32 = 1 << 22;

#[derive(Parser)]
struct Args {
    /// Prefill workers
    #[arg(long, default_value_t = 0)]
    prefill: u32,
    /// Decode workers
    #[arg(long, default_value_t = 0)]
    decode: u32,
    /// Mixed workers
    #[arg(long, default_value_t = 0)]
    mixed: u32,
    /// Milliseconds from a token to the next
    #[arg(long, default_value_t = 5.0)]
    step_ms: f64,
    /// The number of token ids that they know
    #[arg(long)]
    vocab_size: u32,
    /// Tokens of a request at most
    #[arg(long)]
    max_model_len: u32,
    /// Version of the protocol that they say they speak
    #[arg(long, default_value_t = tasuki_wire::PROTOCOL_VERSION)]
    protocol_version: u32,
}

/// A leg that runs here.
struct RunningLeg {
    submit: v1::Submit,
    /// Output tokens of each choice, resumed ones included.
    position: u32,
}

impl RunningLeg {
    fn new(submit: v1::Submit) -> Self {
        let resumed = submit.resumed_tokens.len() as u32;
        // The prefill worker samples the first token, and the decode worker repeats it.
        let position = resumed;
        Self { submit, position }
    }

    fn most(&self) -> u32 {
        self.submit.sampling.as_ref().map_or(1, |s| s.max_tokens)
    }

    /// The next token of every choice; whether the leg is over then.
    fn step(&mut self, outputs: &mut Vec<v1::Output>) -> bool {
        let prompt = &self.submit.prompt_tokens;
        // From the middle on: a prompt begins with special tokens, which have no text.
        let token = prompt[(self.position as usize + prompt.len() / 2) % prompt.len()];
        let last = self.position + 1 == self.most();
        let finish = if last {
            v1::FinishReason::FinishLength
        } else {
            v1::FinishReason::FinishNone
        };
        outputs.extend(self.submit.choices.iter().map(|&choice| v1::Output {
            request_id: self.submit.request_id.clone(),
            choice,
            position: self.position,
            tokens: vec![token],
            finish: finish.into(),
            ..Default::default()
        }));
        self.position += 1;
        last || self.submit.leg() == v1::Leg::Prefill
    }

    fn end(&self) -> v1::LegEnd {
        let handed = self.submit.leg() == v1::Leg::Prefill && self.position < self.most();
        let reason = if handed {
            v1::LegEndReason::LegEndHandedOff
        } else {
            v1::LegEndReason::LegEndFinished
        };
        ended(&self.submit.request_id, reason)
    }
}

fn ended(request_id: &str, reason: v1::LegEndReason) -> v1::LegEnd {
    v1::LegEnd {
        request_id: request_id.to_owned(),
        reason: reason.into(),
        timings: Some(v1::LegTimings::default()),
        ..Default::default()
    }
}

#[derive(Clone)]
struct FakeWorker {
    info: v1::WorkerInfo,
    step: Duration,
}

type Outgoing = mpsc::UnboundedSender<Result<v1::WorkerMessage, Status>>;

#[tonic::async_trait]
impl Worker for FakeWorker {
    type ServeStream = Pin<Box<dyn Stream<Item = Result<v1::WorkerMessage, Status>> + Send>>;

    async fn serve(
        &self,
        request: Request<Streaming<v1::RouterMessage>>,
    ) -> Result<Response<Self::ServeStream>, Status> {
        let (outgoing, receiver) = mpsc::unbounded_channel();
        tokio::spawn(self.clone().session(request.into_inner(), outgoing));
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(
            receiver,
        ))))
    }
}

impl FakeWorker {
    fn new(index: u32, role: v1::Role, address: String, args: &Args) -> Self {
        let info = v1::WorkerInfo {
            protocol_version: args.protocol_version,
            engine_id: format!("fake-{index}"),
            role: Some(v1::RoleSetting {
                role: role.into(),
                owner: "start".to_owned(),
                epoch: 0,
            }),
            max_running_sequences: 1 << 16,
            max_batched_tokens: 1 << 16,
            model: "fake".to_owned(),
            identity: vec![1; 16],
            vocab_size: args.vocab_size,
            max_model_len: args.max_model_len,
            block_size: BLOCK_TOKENS,
            num_blocks: BLOCKS,
            tensor_parallel_size: 1,
            kv_endpoint: address,
            ..Default::default()
        };
        Self {
            info,
            step: Duration::from_secs_f64(args.step_ms / 1e3),
        }
    }

    async fn session(self, mut incoming: Streaming<v1::RouterMessage>, outgoing: Outgoing) {
        send(&outgoing, worker_message::Message::Info(self.info.clone()));
        let mut running: HashMap<String, RunningLeg> = HashMap::new();
        let mut clock = tokio::time::interval(self.step);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut step = 0;
        let mut applied = 0;
        loop {
            let mut report = v1::StepReport::default();
            tokio::select! {
                message = incoming.message() => match message.ok().flatten().and_then(|m| m.message) {
                    Some(router_message::Message::Submit(submit)) => {
                        applied = submit.number;
                        let name = submit.request_id.clone();
                        let mut leg = RunningLeg::new(submit);
                        if leg.step(&mut report.outputs) {
                            report.ended.push(leg.end());
                        } else {
                            running.insert(name, leg);
                        }
                    }
                    Some(router_message::Message::Abort(abort)) => {
                        if running.remove(&abort.request_id).is_some() {
                            report.ended.push(ended(&abort.request_id, v1::LegEndReason::LegEndAborted));
                        }
                    }
                    Some(_) => continue,
                    None => return,
                },
                _ = clock.tick() => {
                    running.retain(|_, leg| {
                        let over = leg.step(&mut report.outputs);
                        if over {
                            report.ended.push(leg.end());
                        }
                        !over
                    });
                }
            }
            step += 1;
            report.step = step;
            report.applied_submits = applied;
            report.load = Some(self.load(running.len() as u32));
            send(&outgoing, worker_message::Message::Step(report));
        }
    }

    fn load(&self, running: u32) -> v1::Load {
        v1::Load {
            running_requests: running,
            running_sequences: running,
            free_blocks: BLOCKS,
            total_blocks: BLOCKS,
            ..Default::default()
        }
    }
}

fn send(outgoing: &Outgoing, message: worker_message::Message) {
    let message = Some(message);
    // A router that is gone receives nothing.
    let _ = outgoing.send(Ok(v1::WorkerMessage { message }));
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args = Args::parse();
    let roles = [
        (v1::Role::Prefill, args.prefill),
        (v1::Role::Decode, args.decode),
        (v1::Role::Mixed, args.mixed),
    ];
    let roles = roles
        .into_iter()
        .flat_map(|(role, count)| std::iter::repeat_n(role, count as usize));
    for (index, role) in (0..).zip(roles) {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let worker = FakeWorker::new(index, role, address.clone(), &args);
        // Without it the kernel holds a token back until the one before is acknowledged.
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let service = Server::builder().add_service(WorkerServer::new(worker));
        tokio::spawn(service.serve_with_incoming(incoming));
        println!("worker {address}");
    }
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    Ok(())
}
