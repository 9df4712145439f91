//! A model's weights as the kernels read them.

use super::panels::{Format, Panels};
use crate::memory::{Arena, Buffer};
use crate::shape::{LayerWeights, Shape};

/// One layer.
pub struct Layer {
    pub attention_norm: Vec<f32>,
    pub qkv: Panels,
    pub qkv_bias: Option<Vec<f32>>,
    /// Of queries and keys.
    pub head_norms: Option<(Vec<f32>, Vec<f32>)>,
    pub output: Panels,
    pub output_bias: Option<Vec<f32>>,
    pub mlp_norm: Vec<f32>,
    /// Panels of the gate and of the other factor in turn.
    pub gate_up: Panels,
    pub down: Panels,
}

impl Layer {
    /// Pack the weights of a layer, whose lengths have been checked.
    pub fn new(arena: &mut Arena, format: Format, shape: &Shape, given: &LayerWeights<'_>) -> Self {
        let norms = given.head_norms;
        Self {
            attention_norm: wide(given.attention_norm),
            qkv: Panels::pack(arena, format, given.qkv, shape.hidden),
            qkv_bias: given.qkv_bias.map(wide),
            head_norms: norms.map(|(query, key)| (wide(query), wide(key))),
            output: Panels::pack(arena, format, given.output, shape.query_dim()),
            output_bias: given.output_bias.map(wide),
            mlp_norm: wide(given.mlp_norm),
            gate_up: Panels::interleave(arena, format, given.gate, given.up, shape.hidden),
            down: Panels::pack(arena, format, given.down, shape.intermediate),
        }
    }
}

/// What comes before and after the layers.
pub struct Ends {
    /// `[vocab, hidden]` as it was given.
    pub embedding: Buffer<u16>,
    pub norm: Vec<f32>,
    pub head: Panels,
}

impl Ends {
    /// Pack; lengths have been checked.
    pub fn new(
        arena: &mut Arena,
        format: Format,
        shape: &Shape,
        embedding: &[u16],
        norm: &[u16],
        head: &[u16],
    ) -> Self {
        let mut table = arena.take(embedding.len());
        table.copy_from_slice(embedding);
        Self {
            embedding: table,
            norm: wide(norm),
            head: Panels::pack(arena, format, head, shape.hidden),
        }
    }
}

fn wide(x: &[u16]) -> Vec<f32> {
    x.iter()
        .map(|&bits| f32::from_bits(u32::from(bits) << 16))
        .collect()
}
