//! What the handlers need of the serving layer; tests put a script there.

use std::sync::Arc;
use std::time::Instant;

use axum::http::Method;
use futures::FutureExt;
use futures::future::BoxFuture;
use tasuki_core::ModelId;

use crate::foreign::native::Asked;
use crate::serve::Service;
use crate::serve::api::{Arrival, Generating, Generation, ModelLimits, Unready};
use crate::workers::Catalog;

pub trait Generator: Send + Sync + 'static {
    /// Starts a generation; its tokens and its end come as events.
    fn generate(&self, generation: Generation, arrival: Arrival) -> Generating;

    /// Of a model; `None` while no worker of it is known.
    fn limits(&self, model: ModelId) -> Option<ModelLimits>;

    /// Ok when a request to the model could be placed now, or to any if `None`; else why not.
    fn readiness(&self, model: Option<ModelId>) -> Result<(), Unready>;

    /// When a worker of the model reported tokens of a request that it decodes, last.
    fn last_decoded(&self, model: ModelId) -> Option<Instant>;

    /// What the workers serve, known so far.
    fn catalog(&self) -> Arc<Catalog>;

    /// Asks every SGLang worker that is connected.
    fn ask_sglang(
        &self,
        method: Method,
        paths: &'static [&'static str],
    ) -> BoxFuture<'_, Vec<Asked>>;

    /// Lets all of our workers that are connected empty their prefix caches, before requests that
    /// are placed after this. How many they are.
    fn flush_caches(&self) -> usize;

    /// Counts an answer that goes on with another worker, after its own was lost.
    fn count_resumed(&self);

    /// The metrics in Prometheus' text format.
    fn metrics_text(&self) -> String;

    /// Counts an answer with an error status among the metrics. `reason`: the error's code in the
    /// answer, or empty.
    fn count_http_error(&self, path: &str, status: u16, reason: &str);
}

impl Generator for Service {
    fn generate(&self, generation: Generation, arrival: Arrival) -> Generating {
        Service::generate(self, generation, arrival)
    }

    fn limits(&self, model: ModelId) -> Option<ModelLimits> {
        Service::limits(self, model)
    }

    fn readiness(&self, model: Option<ModelId>) -> Result<(), Unready> {
        Service::readiness(self, model)
    }

    fn last_decoded(&self, model: ModelId) -> Option<Instant> {
        self.registry().last_decoded(model)
    }

    fn catalog(&self) -> Arc<Catalog> {
        Service::catalog(self)
    }

    fn ask_sglang(
        &self,
        method: Method,
        paths: &'static [&'static str],
    ) -> BoxFuture<'_, Vec<Asked>> {
        Service::ask_sglang(self, method, paths).boxed()
    }

    fn flush_caches(&self) -> usize {
        Service::flush_caches(self)
    }

    fn count_resumed(&self) {
        Service::count_resumed(self);
    }

    fn metrics_text(&self) -> String {
        Service::metrics_text(self)
    }

    fn count_http_error(&self, path: &str, status: u16, reason: &str) {
        Service::count_http_error(self, path, status, reason);
    }
}
