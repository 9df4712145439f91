//! Compares what was forecast for a request with what happened.

use std::sync::Arc;
use std::time::Instant;

use tasuki_core::{Forecast, ModelId};

use super::api::Event;
use crate::workers::Registry;

/// One request since it was let in.
pub struct Checked {
    registry: Arc<Registry>,
    model: ModelId,
    forecast: Forecast,
    admitted: Instant,
    first: Option<Instant>,
    /// Of the first choice.
    tokens: usize,
}

impl Checked {
    pub fn new(registry: &Arc<Registry>, model: ModelId, forecast: Forecast, now: Instant) -> Self {
        Self {
            registry: Arc::clone(registry),
            model,
            forecast,
            admitted: now,
            first: None,
            tokens: 0,
        }
    }

    pub fn observe(&mut self, event: &Event, now: Instant) {
        let (tokens, finish) = match event {
            Event::Tokens {
                choice: 0,
                tokens,
                finish,
                ..
            } => (tokens.len(), finish.is_some()),
            Event::Frame { tokens, .. } => (*tokens as usize, false),
            _ => return,
        };
        let learn = |ttft, tpot| self.registry.learn(self.model, &self.forecast, ttft, tpot);
        self.tokens += tokens;
        let Some(first) = self.first else {
            self.first = Some(now);
            learn(Some(now - self.admitted), None);
            return;
        };
        let after = u32::try_from(self.tokens).unwrap_or(u32::MAX).max(2) - 1;
        if finish {
            learn(None, Some((now - first) / after));
        }
    }
}
