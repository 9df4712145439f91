//! The request log: one line of JSON for each request, without text, so that a load can be replayed
//! before another deployment (`docs/request-log.md` has every field).
//!
//! ```text
//!  requests' tasks ──try_send──▶ bounded queue ──▶ one thread: Sharing, Files ──▶ PATH, PATH.1, …
//!                                                                                    │
//!                                     tasuki simulate, plan, plot ◀── Log::read ◀────┘
//! ```
//!
//! A prompt is known by its length, and by how many of its tokens equal those of which earlier
//! record. That keeps who shares with whom at a few bytes, however long prompts are, and a hash of
//! the content is never written.

mod files;
mod format;
mod limits;
mod reader;
mod sharing;
mod writer;

pub use self::files::{Keep, OpenError};
pub use self::format::{Class, Fleet, Handoff, Header, Outcome, Record, Router, VERSION, Worker};
pub use self::reader::{Log, ReadError, Request};
pub use self::writer::{Dropped, Ended, Hooks, RequestLog};
