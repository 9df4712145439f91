//! What other processors have: the reason why there is no model.

use crate::batch::{Batch, Pool};
use crate::error::CpuError;
use crate::shape::{LayerWeights, Shape};

/// Nobody ever has one.
pub enum Model {}

/// Nobody ever has one.
pub enum Product {}

/// Why this machine cannot run the kernels.
pub fn supported() -> Option<String> {
    Some(format!("no kernels for {}", std::env::consts::ARCH))
}

impl Model {
    /// Refuses.
    ///
    /// # Errors
    /// Always.
    pub fn new(_: Shape, _: &[u16], _: &[u16], _: &[u16]) -> Result<Self, CpuError> {
        Err(CpuError::Unavailable(supported().unwrap_or_default()))
    }

    /// Cannot be called.
    pub fn shape(&self) -> &Shape {
        match *self {}
    }

    /// Cannot be called.
    ///
    /// # Errors
    /// None.
    pub fn push_layer(&mut self, _: &LayerWeights<'_>) -> Result<(), CpuError> {
        match *self {}
    }

    /// Cannot be called.
    ///
    /// # Errors
    /// None.
    ///
    /// # Safety
    /// None needed.
    pub unsafe fn forward(
        &mut self,
        _: Pool,
        _: Batch<'_>,
        _: &[f32],
        _: usize,
        _: &mut [f32],
    ) -> Result<(), CpuError> {
        match *self {}
    }
}

impl Product {
    /// Refuses.
    ///
    /// # Errors
    /// Always.
    pub fn new(_: &[u16], _: usize) -> Result<Self, CpuError> {
        Err(CpuError::Unavailable(supported().unwrap_or_default()))
    }

    /// Cannot be called.
    ///
    /// # Errors
    /// None.
    pub fn run(&self, _: &[u16], _: &mut [f32]) -> Result<(), CpuError> {
        match *self {}
    }
}
