//! A server that answers like a model server, without a model: what it sends,
//! and when, is written in a script. The tests measure the client against it,
//! and `tasuki bench fake-server` lets people try things.

mod command;
mod script;
mod server;
mod wording;

pub use command::{FakeServerArgs, serve_until_told};
pub use script::{Asked, Reply, Step};
pub use server::{FakeServer, Play, play_connection};
pub use wording::Wording;
