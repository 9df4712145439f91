//! A model of any instance.

use crate::batch::{Batch, Pool};
use crate::error::CpuError;
use crate::kernels::{Format, Packed, Steps};
use crate::shape::{LayerWeights, Shape};
use crate::simd::{Instance, with_instance};

/// A Llama-family model with packed weights. Layers are pushed one by one, so that a reader
/// holds one at a time; then it runs steps.
pub struct Model {
    shape: Shape,
    steps: Box<dyn Steps>,
}

impl Model {
    /// A model without layers yet.
    ///
    /// Args: `format` is how weights are kept, all but norms, biases and the embedding;
    /// `embedding` and `head` are `[vocab, hidden]`, bfloat16 bits as all weights.
    ///
    /// # Errors
    /// The kernels do not run it, or not on this processor, or a length is wrong.
    pub fn new(
        instance: Instance,
        format: Format,
        shape: Shape,
        embedding: &[u16],
        norm: &[u16],
        head: &[u16],
    ) -> Result<Self, CpuError> {
        instance.check()?;
        let given = shape.clone();
        let steps: Box<dyn Steps> = with_instance!(instance, S => {
            Box::new(Packed::<S>::new(format, given, embedding, norm, head)?)
        });
        Ok(Self { shape, steps })
    }

    /// Its shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Add the next layer.
    ///
    /// # Errors
    /// A length is wrong, or all layers are there.
    pub fn push_layer(&mut self, weights: &LayerWeights<'_>) -> Result<(), CpuError> {
        self.steps.push_layer(weights)
    }

    /// Run one step on `threads` threads; the same numbers on any number of them.
    ///
    /// `rotations` holds, by position, half a head of cosines, then of sines; `logits`
    /// gets `[logits_rows, vocab]`.
    ///
    /// # Errors
    /// Layers are missing, or the batch is wrong; nothing is computed.
    ///
    /// # Safety
    /// `pool.data` points to `pool.len` numbers that nobody else writes meanwhile; of
    /// their blocks others may read those that this batch does not write to.
    pub unsafe fn forward(
        &mut self,
        pool: Pool,
        batch: Batch<'_>,
        rotations: &[f32],
        threads: usize,
        logits: &mut [f32],
    ) -> Result<(), CpuError> {
        // SAFETY: the caller's promise.
        unsafe { self.steps.forward(pool, batch, rotations, threads, logits) }
    }
}
