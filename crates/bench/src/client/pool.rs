//! Connections that are kept for the next request. There is no limit: who
//! limits what is in flight is the load, not the pool, so that no request
//! ever waits here unseen.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, timeout};

use super::failure::Failure;
use super::transport::Transport;

/// Servers close idle connections, many after 5 s; ours must be gone before.
const IDLE: Duration = Duration::from_secs(3);
const CONNECT: Duration = Duration::from_secs(30);

/// One connection, ready for a request.
pub type Sender = SendRequest<Full<Bytes>>;

/// The connections to one server.
pub struct Pool {
    transport: Arc<dyn Transport>,
    address: String,
    idle: Mutex<Vec<(Sender, Instant)>>,
}

impl Pool {
    pub fn new(transport: Arc<dyn Transport>, address: String) -> Self {
        Self {
            transport,
            address,
            idle: Mutex::new(Vec::new()),
        }
    }

    /// The connection that was used last, if one is left.
    pub fn take(&self) -> Option<Sender> {
        let mut idle = self.idle.lock().expect("nobody panics with the lock");
        while let Some((sender, since)) = idle.pop() {
            if since.elapsed() >= IDLE {
                idle.clear(); // those below are older
            } else if !sender.is_closed() {
                return Some(sender);
            }
        }
        None
    }

    /// Keeps a connection whose answer was read to its end.
    pub fn put(&self, sender: Sender) {
        let mut idle = self.idle.lock().expect("nobody panics with the lock");
        idle.push((sender, Instant::now()));
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn open(&self) -> Result<Sender, Failure> {
        let address = self.address.clone();
        let stream = match timeout(CONNECT, self.transport.connect()).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                return Err(Failure::Refused { address });
            }
            Ok(Err(error)) => {
                let reason = error.to_string();
                return Err(Failure::Connect { address, reason });
            }
            Err(_) => {
                let limit_s = CONNECT.as_secs();
                return Err(Failure::ConnectTimeout { address, limit_s });
            }
        };
        let (sender, connection) =
            http1::handshake(TokioIo::new(stream))
                .await
                .map_err(|error| Failure::Connect {
                    address,
                    reason: error.to_string(),
                })?;
        // Its errors come out of the request that it carries.
        tokio::spawn(connection);
        Ok(sender)
    }
}
