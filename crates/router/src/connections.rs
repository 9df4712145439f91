//! Accepts connections and serves HTTP/1.1 on them, within limits of number and time.
//!
//! At most `max_connections` are served at once. A few more are accepted, so that their
//! clients get an answer instead of silence: each may send one request, which is
//! answered if it is a GET (health, metrics) and refused with 503 otherwise. When those
//! are used up too, new connections wait in the system's queue.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;

use crate::app::App;
use crate::attached;
use crate::routes::{metrics_alone, routes, routes_beyond_the_limit};
use crate::tls::Tls;

/// How many connections there may be and how long one may do nothing.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    pub max_connections: usize,
    /// Until the headers of a connection's next request are complete. It includes the
    /// time between two requests, and bytes that trickle in do not extend it.
    pub idle: Duration,
    /// A client that takes nothing of its answer for so long loses its connection.
    pub client_stall: Duration,
}

/// Connections beyond the limit that are answered at once.
const MAX_REFUSALS: usize = 256;
/// How long one of them may take in all.
const REFUSAL: Duration = Duration::from_secs(2);
/// Connections at once, and those beyond, of each port that is not for clients: a quarter of
/// [`OTHER_FILES`].
const FEW_CONNECTIONS: usize = 48;
const FEW_REFUSALS: usize = 16;
/// Headers of one request together, and what is buffered of a body.
const MAX_BUFFER_BYTES: usize = 64 << 10;
/// Pause after a failure to accept, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Files for other purposes: workers, logs, the tokenizer, the runtime.
const OTHER_FILES: usize = 256;

/// Raises the process's limit of open files as far as the system allows: requests to workers of
/// other engines take some, too. Returns how many of clients' connections it allows.
pub fn connections_allowed(max_connections: usize) -> usize {
    let reserve = MAX_REFUSALS + OTHER_FILES;
    let files = getrlimit(Resource::Nofile);
    let needed = (max_connections + reserve) as u64;
    let wanted = files.maximum.unwrap_or(needed);
    if files.current.is_some_and(|current| current < wanted) {
        let raised = Rlimit {
            current: Some(wanted),
            maximum: files.maximum,
        };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, wanted, "cannot raise the limit of open files");
        }
    }
    let Some(current) = getrlimit(Resource::Nofile).current else {
        return max_connections;
    };
    let current = usize::try_from(current).unwrap_or(usize::MAX);
    let allowed = max_connections.min(current.saturating_sub(reserve).max(1));
    if allowed < max_connections {
        tracing::warn!(
            max_connections,
            open_files = current,
            allowed,
            "--max-connections is above what the limit of open files allows; raise it (ulimit -n)"
        );
    }
    allowed
}

/// Serves clients until `closed`, over https if there is a certificate; then takes no new
/// connections and returns when the others have sent what they still hold.
pub async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    limits: ConnectionLimits,
    tls: Option<Arc<Tls>>,
    closed: impl Future<Output = ()>,
) {
    let entrance = Entrance {
        listener,
        places: Arc::new(Semaphore::new(limits.max_connections)),
        refusals: Arc::new(Semaphore::new(MAX_REFUSALS)),
        is_full: false,
        limit: "--max-connections",
    };
    let served = routes(Arc::clone(&app));
    let refused = routes_beyond_the_limit(app, limits.max_connections);
    let_in(entrance, [served, refused], limits, tls, closed).await;
}

/// Serves /metrics alone, until it is dropped.
pub async fn serve_metrics(listener: TcpListener, app: Arc<App>, limits: ConnectionLimits) {
    serve_few(
        listener,
        metrics_alone(app),
        limits,
        "48 to --metrics-listen",
    )
    .await;
}

/// Serves operators, until it is dropped.
pub async fn serve_operators(listener: TcpListener, routes: Router, limits: ConnectionLimits) {
    serve_few(listener, routes, limits, "48 to --admin-port").await;
}

/// Its connections leave clients theirs.
async fn serve_few(
    listener: TcpListener,
    routes: Router,
    limits: ConnectionLimits,
    limit: &'static str,
) {
    let entrance = Entrance {
        listener,
        places: Arc::new(Semaphore::new(FEW_CONNECTIONS)),
        refusals: Arc::new(Semaphore::new(FEW_REFUSALS)),
        is_full: false,
        limit,
    };
    let never = std::future::pending();
    let_in(entrance, [routes.clone(), routes], limits, None, never).await;
}

/// `routes`: of connections within the limit, and beyond it.
async fn let_in(
    mut entrance: Entrance,
    [served, refused]: [Router; 2],
    limits: ConnectionLimits,
    tls: Option<Arc<Tls>>,
    closed: impl Future<Output = ()>,
) {
    let graceful = GracefulShutdown::new();
    let mut closed = pin!(closed);
    loop {
        let (stream, admission) = tokio::select! {
            accepted = entrance.accept() => accepted,
            () = &mut closed => break,
        };
        let watcher = graceful.watcher();
        match admission {
            Admission::Served(place) => {
                let connection = connection(stream, tls.clone(), served.clone(), limits, watcher);
                tokio::spawn(async move {
                    let _place = place;
                    connection.await;
                });
            }
            Admission::Refused(place) => {
                let limits = ConnectionLimits {
                    idle: REFUSAL,
                    ..limits
                };
                let connection = connection(stream, tls.clone(), refused.clone(), limits, watcher);
                tokio::spawn(async move {
                    let _place = place;
                    let _ = timeout(REFUSAL, connection).await;
                });
            }
        }
    }
    drop(entrance);
    graceful.shutdown().await;
}

/// What becomes of a new connection; its place is free again when this is dropped.
enum Admission {
    Served(OwnedSemaphorePermit),
    Refused(OwnedSemaphorePermit),
}

struct Entrance {
    listener: TcpListener,
    places: Arc<Semaphore>,
    refusals: Arc<Semaphore>,
    /// The limit was reached and that was logged.
    is_full: bool,
    /// Its name for the log.
    limit: &'static str,
}

impl Entrance {
    async fn accept(&mut self) -> (TcpStream, Admission) {
        // A place for a refusal is there before the connection is taken.
        let refusal = Arc::clone(&self.refusals)
            .acquire_owned()
            .await
            .expect("the semaphore is never closed");
        let stream = self.next_stream().await;
        let place = Arc::clone(&self.places).try_acquire_owned();
        if self.is_full != place.is_err() {
            self.is_full = place.is_err();
            if self.is_full {
                tracing::warn!("the limit of connections is reached ({})", self.limit);
            }
        }
        match place {
            Ok(place) => (stream, Admission::Served(place)),
            Err(_) => (stream, Admission::Refused(refusal)),
        }
    }

    async fn next_stream(&self) -> TcpStream {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => return stream,
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// The client has gone already.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}

/// Serves one connection to its end. A handshake has the time that the headers have.
fn connection(
    stream: TcpStream,
    tls: Option<Arc<Tls>>,
    service: Router,
    limits: ConnectionLimits,
    watcher: Watcher,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let Some(tls) = tls else {
        return http(stream, service, limits, watcher);
    };
    Box::pin(async move {
        match timeout(limits.idle, tls.accept(stream)).await {
            Ok(Ok(stream)) => http(stream, service, limits, watcher).await,
            Ok(Err(error)) => tracing::debug!(%error, "no TLS with a client"),
            Err(_) => tracing::debug!(limit = ?limits.idle, "a TLS handshake took too long"),
        }
    })
}

/// Serves HTTP on a connection to its end.
fn http<S: AsyncRead + AsyncWrite + Send + 'static>(
    stream: S,
    service: Router,
    limits: ConnectionLimits,
    watcher: Watcher,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(limits.client_stall));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.idle)
        .max_buf_size(MAX_BUFFER_BYTES)
        .serve_connection(
            TokioIo::new(Box::pin(stream)),
            TowerToHyperService::new(service),
        );
    let connection = attached::run(watcher.watch(connection));
    Box::pin(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection ended early");
        }
    })
}

#[cfg(test)]
mod tests;
