//! A model in memory, and the state that one step after the other uses.

use std::sync::atomic::AtomicUsize;

use super::forward::{Flow, Forward};
use super::panels::Format;
use super::step::{Matrix, Space, Work, chosen, whole};
use super::weights::{Ends, Layer};
use crate::batch::{Batch, Pool};
use crate::error::CpuError;
use crate::memory::Arena;
use crate::shape::{LayerWeights, Shape, check_length};
use crate::simd::Simd;
use crate::team::{Barrier, Team};

/// What a model does, whatever its instance; `crate::Model` documents it.
pub trait Steps: Send + Sync {
    fn push_layer(&mut self, weights: &LayerWeights<'_>) -> Result<(), CpuError>;

    /// # Safety
    /// See `crate::Model`.
    unsafe fn forward(
        &mut self,
        pool: Pool,
        batch: Batch<'_>,
        rotations: &[f32],
        threads: usize,
        logits: &mut [f32],
    ) -> Result<(), CpuError>;
}

/// By which the memory of weights grows; what is not used of it costs nothing.
const WEIGHTS_BYTES: usize = 64 << 20;

/// A model of one instance; `crate::Model` documents the methods.
pub struct Packed<S: Simd> {
    shape: Shape,
    format: Format,
    arena: Arena,
    ends: Ends,
    layers: Vec<Layer>,
    team: Team,
    all: Space<S>,
    wanted: Space<S>,
    work: Vec<Work<S>>,
}

impl<S: Simd> Packed<S> {
    /// A model without layers yet; the processor runs the instance.
    pub fn new(
        format: Format,
        shape: Shape,
        embedding: &[u16],
        norm: &[u16],
        head: &[u16],
    ) -> Result<Self, CpuError> {
        S::INSTANCE.check()?;
        if let Some(reason) = shape.why_not() {
            return Err(CpuError::Unavailable(reason));
        }
        let table = shape.vocab * shape.hidden;
        check_length("embedding", embedding.len(), table)?;
        check_length("norm", norm.len(), shape.hidden)?;
        check_length("head", head.len(), table)?;
        let mut arena = Arena::new(WEIGHTS_BYTES);
        Ok(Self {
            ends: Ends::new(&mut arena, format, &shape, embedding, norm, head),
            format,
            arena,
            layers: Vec::with_capacity(shape.windows.len()),
            team: Team::new(1),
            all: Space::new(),
            wanted: Space::new(),
            work: Vec::new(),
            shape,
        })
    }
}

impl<S: Simd> Steps for Packed<S> {
    fn push_layer(&mut self, weights: &LayerWeights<'_>) -> Result<(), CpuError> {
        weights.check(&self.shape)?;
        let layers = self.shape.windows.len();
        if self.layers.len() == layers {
            let actual = layers as i64;
            return Err(CpuError::Index {
                what: "layer",
                actual,
                limit: layers,
            });
        }
        self.layers.push(Layer::new(
            &mut self.arena,
            self.format,
            &self.shape,
            weights,
        ));
        Ok(())
    }

    unsafe fn forward(
        &mut self,
        pool: Pool,
        batch: Batch<'_>,
        rotations: &[f32],
        threads: usize,
        logits: &mut [f32],
    ) -> Result<(), CpuError> {
        let shape = &self.shape;
        check_length("layers", self.layers.len(), shape.windows.len())?;
        batch.check(shape, &pool, rotations.len() / shape.head_dim)?;
        let wanted_rows = batch.logits_rows.len();
        check_length("logits", logits.len(), wanted_rows * shape.vocab)?;
        let rows = batch.tokens.len();
        if rows == 0 {
            return Ok(());
        }
        if threads.max(1) != self.team.size() {
            self.team = Team::new(threads.max(1));
        }
        let threads = self.team.size();
        let context = batch.context_lens.iter().copied().max().unwrap_or(0);
        if self.work.len() != threads || !self.work.iter().all(|work| work.holds(context)) {
            self.work = (0..threads).map(|_| Work::new(shape, context)).collect();
        }
        let segments = whole(&batch);
        let in_order = batch
            .logits_rows
            .iter()
            .enumerate()
            .all(|(i, &row)| row == i as i64);
        let wanted = (wanted_rows < rows || !in_order).then(|| {
            let (hidden, queries) = self.wanted.places(shape, wanted_rows);
            let segments = chosen(&segments, batch.logits_rows);
            Flow {
                rows: wanted_rows,
                hidden,
                queries,
                segments,
            }
        });
        let (hidden, queries) = self.all.places(shape, rows);
        let step = Forward {
            shape,
            layers: &self.layers,
            ends: &self.ends,
            pool,
            batch,
            rotations,
            all: Flow {
                rows,
                hidden,
                queries,
                segments,
            },
            wanted,
            places: self
                .work
                .iter_mut()
                .map(|work| work.places(shape))
                .collect(),
            logits: Matrix::over(logits.as_mut_ptr(), shape.vocab),
            barrier: Barrier::new(threads),
            taken: (0..=self.layers.len())
                .map(|_| AtomicUsize::new(0))
                .collect(),
        };
        // SAFETY: the machine can (`new`), the batch was checked, places were made for it.
        self.team.run(&|thread| unsafe { step.run(thread) });
        Ok(())
    }
}
