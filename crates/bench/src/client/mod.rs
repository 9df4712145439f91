//! The HTTP client: sends one request, follows its stream, and notes when
//! what came. Light, for it shares the machine with what it measures.

mod answer;
mod body;
mod chunk;
mod exchange;
mod failure;
mod pool;
mod probe;
mod sse;
mod target;
#[cfg(feature = "tls")]
mod tls;
mod transport;

pub use answer::{Answer, Chunk};
pub use body::{RequestOptions, UsageStats};
pub use chunk::Usage;
pub use exchange::{Client, ClientOptions, Stop};
pub use failure::Failure;
pub use probe::{ProbeError, served_model, wait_ready};
pub use target::{Target, TargetError, api_path};
pub use tasuki_http1::Io;
pub use transport::{Network, Transport};
