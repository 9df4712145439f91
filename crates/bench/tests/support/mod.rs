//! A client and a fake server in one process, joined by pipes in memory. The
//! clock stands still while anybody works, so that every time is exact.

#![allow(dead_code)] // every test file uses its part of it

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use serde_json::Map;
use tasuki_bench::arrivals::{Arrival, Process};
use tasuki_bench::client::{
    Client, ClientOptions, Io, RequestOptions, Stop, Target, Transport, UsageStats,
};
use tasuki_bench::fake::{Asked, Play, Reply, Step, Wording, play_connection};
use tasuki_bench::live::Counters;
use tasuki_bench::load::{Load, Sending};
use tasuki_bench::pacer::Pacer;
use tasuki_bench::plan::{Api, Planned, Prompt, Workload};
use tasuki_bench::recorder::{Record, Recorder};
use tasuki_bench::slo::Slo;
use tasuki_bench::summary::{Measuring, Summary, summarize};
use tokio::sync::watch;
use tokio::time::Instant;

/// Connections in memory to a fake server.
pub struct Pipes {
    play: Play,
    opened: Mutex<usize>,
}

impl Pipes {
    pub fn opened(&self) -> usize {
        *self.opened.lock().unwrap()
    }
}

impl Transport for Pipes {
    fn connect(&self) -> BoxFuture<'static, std::io::Result<Box<dyn Io>>> {
        *self.opened.lock().unwrap() += 1;
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        tokio::spawn(play_connection(theirs, self.play.clone()));
        Box::pin(async { Ok(Box::new(ours) as Box<dyn Io>) })
    }
}

/// Requests with ten-token prompts.
pub struct Requests {
    planned: VecDeque<Planned>,
    /// Think time and follow-ups of each request.
    follow: Option<(Duration, usize)>,
    total: usize,
    pub answers: Arc<Mutex<Vec<(usize, String)>>>,
}

pub fn requests(count: usize, output_tokens: u32) -> Requests {
    Requests {
        planned: (0..count)
            .map(|index| planned(index, output_tokens))
            .collect(),
        follow: None,
        total: count,
        answers: Arc::default(),
    }
}

impl Requests {
    /// Every request of the first `count` is followed by one more, `thinking` later.
    pub fn followed(mut self, thinking: Duration) -> Self {
        self.follow = Some((thinking, self.total));
        self
    }
}

pub fn planned(index: usize, output_tokens: u32) -> Planned {
    Planned {
        index,
        prompt: Prompt::Text("ten words in a prompt are ten tokens here, see?".to_owned()),
        input_tokens: Some(10),
        output_tokens,
        exact_output: true,
        at: None,
    }
}

impl Workload for Requests {
    fn next(&mut self) -> Option<Planned> {
        self.planned.pop_front()
    }

    fn answered(&mut self, index: usize, text: &str) -> Option<(Duration, Planned)> {
        self.answers.lock().unwrap().push((index, text.to_owned()));
        let (thinking, first) = self.follow?;
        (index < first).then(|| (thinking, planned(index + first, 2)))
    }

    fn total(&self) -> Option<usize> {
        Some(self.total)
    }
}

/// How a test's load is sent; what is left out is as plain as can be.
pub struct Setting {
    pub arrival: Arrival,
    pub usage: UsageStats,
    pub api: Api,
    pub timeout: Duration,
    pub duration: Option<Duration>,
    pub stop: Option<Stop>,
}

impl Setting {
    pub fn new(process: Process) -> Self {
        Self {
            arrival: Arrival {
                process,
                max_concurrency: None,
                ramp_s: 0.0,
            },
            usage: UsageStats::Chunks,
            api: Api::Completions,
            timeout: Duration::from_secs(3600),
            duration: None,
            stop: None,
        }
    }

    pub fn at_most(mut self, requests: usize) -> Self {
        self.arrival.max_concurrency = Some(requests);
        self
    }
}

/// What a run came to.
pub struct Run {
    pub records: Vec<Record>,
    pub paced: bool,
    pub interrupted: bool,
    pub connections: usize,
    pub start: Instant,
}

impl Run {
    pub fn summary(&self) -> Summary {
        self.measured(None, None)
    }

    pub fn measured(&self, steady_s: Option<(f64, f64)>, slo: Option<&Slo>) -> Summary {
        let paced = self.paced;
        summarize(
            &self.records,
            Measuring {
                steady_s,
                slo,
                paced,
            },
        )
    }
}

/// The client of a test and its server.
pub fn client(setting: &Setting, play: &Play) -> (Arc<Client>, Arc<Pipes>) {
    let target = Target::parse("http://fake:1").unwrap();
    let pipes = Arc::new(Pipes {
        play: play.clone(),
        opened: Mutex::new(0),
    });
    let options = ClientOptions {
        request: RequestOptions {
            api: setting.api,
            model: "fake".to_owned(),
            usage: setting.usage,
            temperature: None,
            extra: Map::new(),
        },
        api_key: None,
        headers: Vec::new(),
        timeout: setting.timeout,
    };
    let transport = Arc::clone(&pipes) as Arc<dyn Transport>;
    let client = Client::new(&target, transport, options, Arc::new(Counters::default()));
    (Arc::new(client.unwrap()), pipes)
}

/// Sends `workload` to a server that plays `script`, to the end.
pub async fn run(
    setting: Setting,
    workload: Requests,
    script: impl Fn(&Asked) -> Reply + Send + Sync + 'static,
) -> Run {
    let (client, pipes) = client(&setting, &Play::new(script));
    let (never, stop) = watch::channel(false);
    let limited = setting.arrival.max_concurrency.is_some();
    let load = Load {
        client,
        workload: Box::new(workload),
        arrival: setting.arrival,
        seed: 0,
        duration: setting.duration,
        pacer: Pacer::Tokio,
        stop: setting.stop.unwrap_or(stop),
    };
    let sending = load.ready().run().await;
    drop(never);
    let Sending {
        start,
        answers,
        interrupted,
        ..
    } = sending;
    let recorder = Recorder::new(start, None);
    let records = answers
        .into_iter()
        .map(|(sent, answer)| recorder.record(&sent, answer));
    let mut records: Vec<Record> = records.collect();
    records.sort_by_key(|record| record.index);
    Run {
        records,
        paced: !limited && !setting.arrival.is_closed(),
        interrupted,
        connections: pipes.opened(),
        start,
    }
}

pub fn ms(milliseconds: u64) -> Duration {
    Duration::from_millis(milliseconds)
}

pub fn wait(milliseconds: u64) -> Step {
    Step::Wait(ms(milliseconds))
}

/// A stream of chunks, each after its wait in ms, as (wait, tokens); ended as it should be.
pub fn stream(asked: &Asked, chunks: &[(u64, u32)]) -> Reply {
    let mut wording = Wording::new(asked);
    let mut steps = Vec::new();
    for &(wait_ms, tokens) in chunks {
        steps.push(wait(wait_ms));
        steps.push(wording.chunk(&" the".repeat(tokens as usize), tokens));
    }
    steps.push(wording.finish());
    steps.extend(wording.usage());
    steps.push(Wording::done());
    Reply::stream(steps)
}

/// `max_tokens` tokens: the first after `ttft_ms`, the others `itl_ms` apart.
pub fn steady(asked: &Asked, ttft_ms: u64, itl_ms: u64) -> Reply {
    let waits = (0..asked.max_tokens).map(|n| if n == 0 { ttft_ms } else { itl_ms });
    let chunks: Vec<(u64, u32)> = waits.map(|wait_ms| (wait_ms, 1)).collect();
    stream(asked, &chunks)
}

/// Equal up to rounding.
#[track_caller]
pub fn close(seen: f64, wanted: f64) {
    assert!(
        (seen - wanted).abs() < 1e-6 * wanted.abs().max(1.0),
        "{seen} is not {wanted}"
    );
}
