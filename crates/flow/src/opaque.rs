//! What passes through the state machine unread: requests and answers of workers that take
//! text, in their own protocols. Only shells and links know what is in it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use tasuki_core::{Identity, Indivisible};

/// Content of any type, shared.
#[derive(Clone)]
pub struct Opaque(Arc<dyn Any + Send + Sync>);

impl Opaque {
    pub fn new<T: Any + Send + Sync>(content: T) -> Self {
        Self(Arc::new(content))
    }

    /// The content, if it is of that type.
    pub fn get<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

/// Whether it is the same content, not an equal one.
impl PartialEq for Opaque {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opaque")
    }
}

/// A request for workers that take it as it is.
///
/// Its generation has one choice, whatever the request asks for: the answer is one stream of
/// frames. The generation's prompt and `max_tokens` are estimates, for placement alone.
#[derive(Debug, Clone, PartialEq)]
pub struct OpaqueRequest {
    pub content: Opaque,
    /// That the worker makes of it: prompts times choices, at least 1.
    pub sequences: u32,
    /// The names of the adapters that it is for: only some of the model's workers may have them.
    pub adapters: Vec<Arc<str>>,
    /// Only workers of this identity can take it; `None`: all of the model.
    pub bound_to: Option<Identity>,
    /// Why it has no handoff by ticket, if it has none.
    pub indivisible: Option<Indivisible>,
    /// It goes on with an answer that has begun, so it waits for workers as an accepted request does.
    pub resumes: bool,
}
