//! `tasuki bench fake-server`.

use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::script::{Asked, Reply, Step};
use super::server::{FakeServer, Play};
use super::wording::Wording;

/// Answers OpenAI requests with made-up tokens, at the times that you set:
/// to try a client, a dashboard or a benchmark without a model.
#[derive(Debug, Clone, Args)]
pub struct FakeServerArgs {
    /// Address to bind.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,

    /// Port to bind; 0 lets the system choose.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,

    /// Time to first token, in milliseconds; 0 is as fast as it can.
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub ttft_ms: u32,

    /// Time added to it for every prompt token, in microseconds.
    #[arg(long, value_name = "US", default_value_t = 0)]
    pub prefill_us_per_token: u32,

    /// Time between chunks, in milliseconds; 0 is as fast as it can.
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub itl_ms: u32,

    /// Tokens in a chunk.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub tokens_per_chunk: u32,

    /// Threads.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,
}

/// The text of one token, for most tokenizers.
const TOKEN: &str = " the";

impl FakeServerArgs {
    fn reply(&self, asked: &Asked) -> Reply {
        let prefill_us = u64::from(self.prefill_us_per_token) * u64::from(asked.prompt_tokens);
        let ttft = Duration::from_millis(self.ttft_ms.into()) + Duration::from_micros(prefill_us);
        let itl = Duration::from_millis(self.itl_ms.into());
        let mut wording = Wording::new(asked);
        if !asked.stream {
            let _ = wording.chunk("", asked.max_tokens);
            let text = TOKEN.repeat(asked.max_tokens as usize);
            let mut reply = Reply::json(200, &wording.whole(&text));
            reply.delay = ttft + itl * asked.max_tokens.saturating_sub(1) / self.tokens_per_chunk;
            return reply;
        }
        let mut steps = Vec::new();
        let mut wait = ttft;
        let mut left = asked.max_tokens;
        while left > 0 {
            let tokens = left.min(self.tokens_per_chunk);
            left -= tokens;
            if !wait.is_zero() {
                steps.push(Step::Wait(wait));
            }
            wait = itl;
            steps.push(wording.chunk(&TOKEN.repeat(tokens as usize), tokens));
        }
        steps.push(wording.finish());
        steps.extend(wording.usage());
        steps.push(Wording::done());
        Reply::stream(steps)
    }
}

/// Serves until SIGINT or SIGTERM.
///
/// # Errors
/// Why it cannot listen.
pub fn serve_until_told(args: FakeServerArgs) -> io::Result<()> {
    let mut builder = match args.threads {
        1 => tokio::runtime::Builder::new_current_thread(),
        threads => {
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(threads.into());
            builder
        }
    };
    builder.enable_all().build()?.block_on(async move {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let (host, port) = (args.host.clone(), args.port);
        let play = Play::new(move |asked| args.reply(asked));
        let server = FakeServer::start((&host, port), play).await?;
        let mut stdout = io::stdout();
        writeln!(stdout, "listening on http://{}", server.address)?;
        stdout.flush()?;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        Ok(())
    })
}
