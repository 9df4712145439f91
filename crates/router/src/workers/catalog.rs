//! What the workers serve, as requests ask for it: made anew after a worker has come, changed or
//! gone, and not for each request.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use tasuki_core::{Identity, ModelId};
use tasuki_flow::fleet::WorkerInfo;

use super::foreign::UNKNOWN_CONTEXT;
use super::registry::{Registry, State};
use crate::app::ForeignModel;
use crate::discovery::{Address, Engine};
use crate::serve::api::ModelLimits;

/// Of all workers that have ever sent their information, up or not.
#[derive(Debug, Default)]
pub struct Catalog {
    limits: BTreeMap<ModelId, ModelLimits>,
    /// Models whose workers take requests as they are.
    pub foreign: Arc<[ForeignModel]>,
    /// The identity of each engine's workers, by the model that they serve.
    engines: Vec<(ModelId, Engine, Identity)>,
    /// Their names without adapters: a request by any other name is not for a model itself.
    pub bases: HashSet<String>,
}

impl Catalog {
    fn of(state: &State) -> Self {
        let mut catalog = Self::default();
        for worker in state.fleet.workers() {
            let Some((model, info)) = worker.model.zip(worker.info.as_ref()) else {
                continue;
            };
            catalog
                .limits
                .entry(model)
                .and_modify(|limits| widen(limits, info))
                .or_insert(ModelLimits {
                    max_model_len: info.max_model_len,
                    common_len: info.max_model_len,
                    vocab_size: info.vocab_size,
                });
            let member = state.members.get(&worker.view.id);
            let address = member.and_then(|member| Address::parse(&member.address).ok());
            if let Some(Address::Foreign(address)) = address {
                let served = (model, address.engine, worker.view.domain.identity);
                if !catalog.engines.contains(&served) {
                    catalog.engines.push(served);
                }
            }
        }
        let foreign = state.fleet.opaque_models().map(|model| {
            catalog.bases.extend(model.names.iter().cloned());
            let names = model.names.iter().chain(model.adapters);
            ForeignModel {
                id: model.id,
                names: names.cloned().collect(),
                max_model_len: { catalog.limits.get(&model.id) }
                    .map(|limits| limits.max_model_len)
                    .filter(|length| *length != UNKNOWN_CONTEXT),
            }
        });
        catalog.foreign = foreign.collect();
        catalog
    }

    /// Of a model's workers of an engine; `None`: it has none.
    pub fn identity(&self, model: ModelId, engine: Engine) -> Option<Identity> {
        let mut served = self.engines.iter();
        let found = served.find(|(id, by, _)| (*id, *by) == (model, engine));
        found.map(|(_, _, identity)| *identity)
    }

    /// What a model's workers take; `None` while none was ever seen.
    pub fn limits(&self, model: ModelId) -> Option<ModelLimits> {
        self.limits.get(&model).cloned()
    }
}

/// By those of one more worker.
fn widen(limits: &mut ModelLimits, info: &WorkerInfo) {
    limits.max_model_len = limits.max_model_len.max(info.max_model_len);
    limits.common_len = limits.common_len.min(info.max_model_len);
    limits.vocab_size = limits.vocab_size.min(info.vocab_size);
}

impl Registry {
    /// What the workers serve now.
    pub fn catalog(&self) -> Arc<Catalog> {
        let mut state = self.lock();
        if let Some(known) = &state.catalog {
            return Arc::clone(known);
        }
        let catalog = Arc::new(Catalog::of(&state));
        state.catalog = Some(Arc::clone(&catalog));
        catalog
    }
}
