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
    /// Models that SGLang workers serve, each with the identity of these workers.
    pub sglang: Vec<(ModelId, Identity)>,
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
            let served = (model, worker.view.domain.identity);
            if let Some(Address::Foreign(address)) = address
                && address.engine == Engine::Sglang
                && !catalog.sglang.contains(&served)
            {
                catalog.sglang.push(served);
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
