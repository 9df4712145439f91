//! What the handlers need of the serving layer; tests put a script there.

use std::time::Instant;

use crate::serve::Service;
use crate::serve::api::{Generating, Generation, ModelLimits};

pub trait Generator: Send + Sync + 'static {
    /// Starts a generation; its tokens and its end come as events. `received`: when the
    /// whole of the client's request was there.
    fn generate(&self, generation: Generation, received: Instant) -> Generating;

    /// `None` while no worker is known.
    fn limits(&self) -> Option<ModelLimits>;

    /// Ok when a request could be placed now, else why not.
    fn readiness(&self) -> Result<(), String>;

    /// The metrics in Prometheus' text format.
    fn metrics_text(&self) -> String;

    /// Counts an answer with an error status among the metrics.
    fn count_http_error(&self, path: &str, status: u16);
}

impl Generator for Service {
    fn generate(&self, generation: Generation, received: Instant) -> Generating {
        Service::generate(self, generation, received)
    }

    fn limits(&self) -> Option<ModelLimits> {
        Service::limits(self)
    }

    fn readiness(&self) -> Result<(), String> {
        Service::readiness(self)
    }

    fn metrics_text(&self) -> String {
        Service::metrics_text(self)
    }

    fn count_http_error(&self, path: &str, status: u16) {
        Service::count_http_error(self, path, status);
    }
}
