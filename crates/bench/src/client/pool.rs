//! Connections that are kept for the next request. There is no limit: who
//! limits what is in flight is the load, not the pool, so that no request
//! ever waits here unseen.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tasuki_http1::Connection;
use tokio::time::{Instant, timeout};

use super::failure::Failure;
use super::transport::Transport;

/// Servers close idle connections, many after 5 s; ours must be gone before.
const IDLE: Duration = Duration::from_secs(3);
const CONNECT: Duration = Duration::from_secs(30);
/// What is read at once at most.
const READ_BYTES: usize = 64 << 10;

/// The connections to one server.
pub struct Pool {
    transport: Arc<dyn Transport>,
    address: String,
    idle: Mutex<Vec<(Connection, Instant)>>,
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
    pub fn take(&self) -> Option<Connection> {
        let mut idle = self.idle.lock().expect("nobody panics with the lock");
        let (connection, since) = idle.pop()?;
        if since.elapsed() < IDLE {
            return Some(connection);
        }
        idle.clear(); // those below are older
        None
    }

    /// Keeps a connection whose answer was read to its end.
    pub fn put(&self, connection: Connection) {
        let mut idle = self.idle.lock().expect("nobody panics with the lock");
        idle.push((connection, Instant::now()));
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn open(&self) -> Result<Connection, Failure> {
        let address = self.address.clone();
        Err(match timeout(CONNECT, self.transport.connect()).await {
            Ok(Ok(io)) => return Ok(Connection::new(io, READ_BYTES)),
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                Failure::Refused { address }
            }
            // What rustls finds wrong with a certificate or a message; TCP has no such error.
            Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => Failure::Tls {
                address,
                reason: error.to_string(),
            },
            Ok(Err(error)) => Failure::Connect {
                address,
                reason: error.to_string(),
            },
            Err(_) => Failure::ConnectTimeout {
                address,
                limit_s: CONNECT.as_secs(),
            },
        })
    }
}
