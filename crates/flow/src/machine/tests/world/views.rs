//! The fleet of a world, as the machine sees it.

use tasuki_core::{
    Capacity, CostModel, Health, KvDomain, ModelId, Outstanding, ReportedLoad, RequestView,
    WorkerId, WorkerView,
};
use tasuki_policy::{Choosing, NoPlacement, Policy, WorkerIndex};

use super::{Worker, World, engine};
use crate::machine::{Fleet, Placed};
use crate::worker_ref::{Peer, WorkerKey, WorkerRef};

/// What the machine places onto.
pub(super) struct Views {
    views: Vec<WorkerView>,
    keys: Vec<Option<WorkerKey>>,
    pub(super) tie: u64,
    pub(super) dry: usize,
    model: CostModel,
}

impl World {
    pub(super) fn views(&self) -> Views {
        let view = |(index, worker): (usize, &Worker)| WorkerView {
            id: WorkerId(index as u32),
            domain: KvDomain::default(),
            capabilities: self.setup.capabilities,
            role: worker.role,
            hardware: 0,
            machine: 0,
            health: if worker.key.is_some() {
                Health::Ready
            } else {
                Health::Down
            },
            capacity: Capacity {
                max_model_len_tokens: 1_000,
                max_sequences: u32::MAX,
                block_size_tokens: 16,
                total_blocks: 200,
            },
            load: ReportedLoad {
                free_blocks: 200,
                ..ReportedLoad::default()
            },
            outstanding: Outstanding::default(),
        };
        Views {
            views: self.workers.iter().enumerate().map(view).collect(),
            keys: self.workers.iter().map(|worker| worker.key).collect(),
            model: CostModel::default(),
            tie: self.tie,
            dry: self.dry,
        }
    }
}

impl Fleet for Views {
    fn place(&mut self, request: &RequestView) -> Result<Placed, NoPlacement> {
        self.tie += 1;
        let index = self.index();
        let [by_role, by_cost] = self.choosing();
        let placement = index
            .place(request, by_role)
            .or_else(|_| index.place(request, by_cost))?;
        Ok(Placed {
            prefill: self.worker_ref(placement.prefill),
            decode: self.worker_ref(placement.decode),
            why: placement.why,
        })
    }

    fn place_decode(
        &mut self,
        request: &RequestView,
        prefill: WorkerKey,
        tried: &[WorkerId],
    ) -> Option<WorkerRef> {
        self.tie += 1;
        let (index, prefill) = (self.index(), prefill.worker);
        let ways = self.choosing().into_iter();
        let mut found = ways.filter_map(|how| index.place_decode(request, prefill, tried, how));
        found.next().map(|id| self.worker_ref(id))
    }

    fn may_retry(&mut self) -> bool {
        let is_dry = self.dry > 0;
        self.dry = self.dry.saturating_sub(1);
        !is_dry
    }
}

impl Views {
    fn index(&self) -> WorkerIndex {
        let mut index = WorkerIndex::default();
        for worker in &self.views {
            index.update(ModelId::default(), worker);
        }
        index
    }

    /// By role while there are workers of each, so that short requests are split too.
    fn choosing(&self) -> [Choosing<'_>; 2] {
        [true, false].map(|strict_roles| Choosing {
            model: &self.model,
            strict_roles,
            tie: self.tie,
        })
    }

    fn worker_ref(&self, id: WorkerId) -> WorkerRef {
        let key = self.keys[id.0 as usize].expect("only workers that are up are chosen");
        WorkerRef {
            key,
            peer: Peer {
                engine_id: engine(key),
                kv_endpoint: String::new(),
            },
            capabilities: self.views[id.0 as usize].capabilities,
            identity: self.views[id.0 as usize].domain.identity,
        }
    }
}
