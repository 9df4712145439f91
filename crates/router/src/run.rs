//! The life of the router's process: start, serve, drain, exit.

use std::ffi::OsString;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tasuki_reqlog::OpenError;
use tasuki_text::TextError;
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::api_keys::{ApiKeys, KeysError, keep_reading};
use crate::app::{App, HttpSettings};
use crate::config::RouterArgs;
use crate::connections::{self, ConnectionLimits};
use crate::dashboard;
use crate::log;
use crate::models::{Models, NamesError};
use crate::operators;
use crate::serve;
use crate::tls::fleet::WorkerTransport;
use crate::tls::{Tls, TlsError};
use crate::traces::{TraceError, Traces};

/// Exit codes: as clap has it, and as a shell has it for an interrupt.
const FAILED: i32 = 1;
const USAGE: i32 = 2;
const INTERRUPTED: i32 = 130;

/// The admin API has no authentication, so only this machine reaches it.
const ADMIN_HOST: &str = "127.0.0.1";

/// After draining: for connections to send what they still hold.
const CLOSING: Duration = Duration::from_secs(1);

/// Why the router could not start.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("--model {path}: {source}")]
    Model { path: String, source: TextError },
    #[error(transparent)]
    Names(#[from] NamesError),
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Traces(#[from] TraceError),
    #[error(transparent)]
    RequestLog(#[from] OpenError),
    #[error("cannot listen on {address} ({source}): choose another {option}")]
    Bind {
        option: &'static str,
        address: String,
        source: std::io::Error,
    },
    #[error("--log {filter}: {source}")]
    Log {
        filter: String,
        source: tracing_subscriber::filter::ParseError,
    },
    #[error("cannot run: {0}")]
    System(#[from] std::io::Error),
}

#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no UTF-8, which this command requires: rename the file or the folder")]
struct WordError(OsString);

/// Runs `tasuki router` with these arguments (the program's name not among
/// them) until it is told to end. Returns the exit code.
pub fn run(arguments: impl IntoIterator<Item: Into<OsString>>) -> i32 {
    let words = match in_utf8(arguments) {
        Ok(words) => words,
        Err(error) => {
            eprintln!("tasuki router: {error}");
            return USAGE;
        }
    };
    let words = std::iter::once("tasuki router".to_owned()).chain(words);
    let args = match RouterArgs::parse_from_words(words) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { USAGE } else { 0 };
        }
    };
    match start(args) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("tasuki router: {error}");
            FAILED
        }
    }
}

fn in_utf8(words: impl IntoIterator<Item: Into<OsString>>) -> Result<Vec<String>, WordError> {
    let words = words.into_iter().map(|word| word.into().into_string());
    words.map(|word| word.map_err(WordError)).collect()
}

fn start(args: RouterArgs) -> Result<(), StartError> {
    log::start(&args.log, args.access_log).map_err(|source| StartError::Log {
        filter: args.log.clone(),
        source,
    })?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("router")
        .build()?;
    let result = runtime.block_on(serve(args));
    // A body that is still being tokenized is not waited for.
    runtime.shutdown_background();
    result
}

async fn serve(args: RouterArgs) -> Result<(), StartError> {
    let mut signals = Signals::new()?;
    let names = args.models()?;
    let specs = names.models;
    let models = Models::load(&specs).map_err(|(path, source)| StartError::Model {
        path: path.display().to_string(),
        source,
    })?;
    let keys = api_keys(&args)?;
    let listener = bind("--host or --port", &args.host, args.port).await?;
    let tls = Tls::load(&args.tls)?;
    let transport = WorkerTransport::load(&args.fleet)?;
    if let Some(tls) = &tls {
        tokio::spawn(Arc::clone(tls).keep_reading());
    }
    let scheme = if tls.is_some() { "https" } else { "http" };
    let url = url(scheme, &args.host, listener.local_addr()?);
    let admin = match args.admin_port {
        Some(port) => Some(bind("--admin-port", ADMIN_HOST, port).await?),
        None => None,
    };
    let metrics = match &args.metrics_listen {
        Some(listen) => Some(bind("--metrics-listen", &listen.host, listen.port).await?),
        None => None,
    };
    let service = serve::Service::start(serve::Config {
        transport,
        ..args.serving(&specs)
    });
    let dropped = &service.metrics().request_log_dropped;
    let log = args
        .request_log
        .start(args.logged(), service.registry(), dropped)?;
    if let Some(log) = log {
        service.keep_log(log);
    }
    let http = HttpSettings {
        foreign_aliases: names.foreign,
        ..args.http()
    };
    let traces = Traces::start(&args.traces, &service.metrics().trace_spans_dropped)?;
    let app = Arc::new(App {
        keys,
        traces,
        is_local: listener.local_addr()?.ip().to_canonical().is_loopback(),
        ..App::new(Arc::new(service.clone()), models, http)
    });
    let limits = args.connections();
    let limits = ConnectionLimits {
        max_connections: connections::connections_allowed(limits.max_connections),
        ..limits
    };
    if let Some(listener) = admin {
        let address = listener.local_addr()?;
        tracing::info!(dashboard = %format_args!("http://{address}/dashboard"), "admin API");
        let metrics = Arc::clone(service.metrics());
        let source = dashboard::Source {
            registry: Arc::clone(service.registry()),
            metrics: Arc::clone(&metrics),
        };
        let routes = operators::routes(source, Arc::clone(&app));
        tokio::spawn(async move { metrics.recorder.keep_time().await });
        // It ends with the process: a drain can be watched to its end.
        tokio::spawn(connections::serve_operators(listener, routes, limits));
    }
    if let Some(listener) = metrics {
        let address = listener.local_addr()?;
        tracing::info!(%address, "metrics");
        let served = connections::serve_metrics(listener, Arc::clone(&app), limits);
        tokio::spawn(served); // it ends with the process, as the admin API does
    }

    let (close, closed) = tokio::sync::oneshot::channel::<()>();
    let server = connections::serve(listener, Arc::clone(&app), limits, tls, async {
        let _ = closed.await;
    });
    let server = tokio::spawn(server);
    announce(&url)?;

    let grace = match signals.next().await {
        Told::Terminate => args.readiness_grace(),
        Told::Interrupt => Duration::ZERO,
    };
    tokio::select! {
        () = end(&app, &service, grace, args.drain()) => {}
        _ = signals.next() => std::process::exit(INTERRUPTED),
    }
    let _ = close.send(());
    let _ = tokio::time::timeout(CLOSING, server).await;
    if let Some(traces) = &app.traces {
        traces.end().await;
    }
    tokio::task::block_in_place(|| service.close_log());
    tracing::info!("stopped");
    Ok(())
}

/// The keys of the file and of the environment; `None`: neither is named.
fn api_keys(args: &RouterArgs) -> Result<Option<Arc<ApiKeys>>, KeysError> {
    let (file, variable) = (&args.api_keys_file, &args.api_key_env);
    if file.is_none() && variable.is_none() {
        return Ok(None);
    }
    let keys = Arc::new(ApiKeys::new(variable.as_deref())?);
    if let Some(path) = file {
        let text = keys.read(path)?;
        tokio::spawn(keep_reading(Arc::clone(&keys), path.to_owned(), text));
    }
    Ok(Some(keys))
}

async fn bind(option: &'static str, host: &str, port: u16) -> Result<TcpListener, StartError> {
    let listener = TcpListener::bind((host, port)).await;
    listener.map_err(|source| StartError::Bind {
        option,
        address: format!("{host}:{port}"),
        source,
    })
}

/// Turns readiness off and goes on serving for `grace`, while load balancers notice. Then
/// takes no new requests, waits for those that run up to the deadline, and ends the rest.
async fn end(app: &App, service: &serve::Service, grace: Duration, deadline: Duration) {
    app.gate.leave();
    if !grace.is_zero() {
        tracing::info!(?grace, "not ready any more; still serving");
        tokio::time::sleep(grace).await;
    }
    tracing::info!(?deadline, "draining; a second signal exits at once");
    app.gate.close();
    if !app.gate.wait_empty(deadline).await {
        tracing::warn!("requests were still running when the drain deadline passed");
    }
    service.drain(Duration::ZERO).await;
}

/// The one line on stdout that says where the router is.
fn announce(url: &str) -> std::io::Result<()> {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "listening on {url}")?;
    stdout.flush()
}

fn url(scheme: &str, host: &str, bound: SocketAddr) -> String {
    let port = bound.port();
    if host.contains(':') {
        format!("{scheme}://[{host}]:{port}")
    } else {
        format!("{scheme}://{host}:{port}")
    }
}

/// SIGINT, of a person, and SIGTERM, of whatever supervises the process.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

enum Told {
    Interrupt,
    Terminate,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
        })
    }

    async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.interrupt.recv() => Told::Interrupt,
            _ = self.terminate.recv() => Told::Terminate,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn an_argument_that_is_no_utf8_is_named() {
        let word = OsString::from_vec(b"--model=/m/\xff".to_vec());
        let said = in_utf8([word.clone()]).unwrap_err().to_string();
        assert!(
            said.starts_with(r#""--model=/m/\xFF" is no UTF-8"#),
            "{said}"
        );
        assert_eq!(run([word]), USAGE);
    }
}
