//! The shape of a model, and its weights as they are handed over.

use crate::error::CpuError;

/// Most query heads that may share a KV head: they are attended for together.
pub const MOST_GROUP: usize = 48;

/// A Llama-family model, without its weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    pub heads: usize,
    pub kv_heads: usize,
    /// Numbers of one head.
    pub head_dim: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub vocab: usize,
    /// Added to the mean square under a norm's root.
    pub norm_eps: f32,
    /// Per layer, tokens that a query sees, itself included; `None`: all.
    pub windows: Vec<Option<usize>>,
}

impl Shape {
    /// Query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Numbers of all query heads.
    pub fn query_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers of queries, keys and values together.
    pub fn qkv_dim(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Why the kernels cannot run it, whatever the machine.
    pub fn why_not(&self) -> Option<String> {
        let sizes = [
            self.heads,
            self.kv_heads,
            self.hidden,
            self.intermediate,
            self.vocab,
        ];
        if sizes.contains(&0) || !self.heads.is_multiple_of(self.kv_heads) {
            return Some(format!(
                "{} heads over {} KV heads",
                self.heads, self.kv_heads
            ));
        }
        if self.group() > MOST_GROUP {
            let group = self.group();
            return Some(format!(
                "{group} heads share a KV head, must be at most {MOST_GROUP}"
            ));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) || self.head_dim > 512 {
            let dim = self.head_dim;
            return Some(format!(
                "heads of {dim} numbers, must be even and at most 512"
            ));
        }
        None
    }
}

/// One layer's weights, bfloat16 bits, `[outputs, inputs]`.
#[derive(Debug, Clone, Copy)]
pub struct LayerWeights<'a> {
    pub attention_norm: &'a [u16],
    /// Queries', keys' and values' rows, one after the other.
    pub qkv: &'a [u16],
    pub qkv_bias: Option<&'a [u16]>,
    /// Of queries and keys.
    pub head_norms: Option<(&'a [u16], &'a [u16])>,
    pub output: &'a [u16],
    pub output_bias: Option<&'a [u16]>,
    pub mlp_norm: &'a [u16],
    pub gate: &'a [u16],
    pub up: &'a [u16],
    pub down: &'a [u16],
}

impl LayerWeights<'_> {
    /// Compare all lengths with a shape.
    pub fn check(&self, shape: &Shape) -> Result<(), CpuError> {
        let (hidden, inner, dim) = (shape.hidden, shape.intermediate, shape.head_dim);
        let bias = |given: Option<&[u16]>, expected| given.map_or(expected, <[u16]>::len);
        let norms = self
            .head_norms
            .map_or((dim, dim), |(q, k)| (q.len(), k.len()));
        let (qkv, query) = (shape.qkv_dim(), shape.query_dim());
        for (what, actual, expected) in [
            ("attention_norm", self.attention_norm.len(), hidden),
            ("qkv", self.qkv.len(), qkv * hidden),
            ("qkv_bias", bias(self.qkv_bias, qkv), qkv),
            ("query_norm", norms.0, dim),
            ("key_norm", norms.1, dim),
            ("output", self.output.len(), hidden * query),
            ("output_bias", bias(self.output_bias, hidden), hidden),
            ("mlp_norm", self.mlp_norm.len(), hidden),
            ("gate", self.gate.len(), inner * hidden),
            ("up", self.up.len(), inner * hidden),
            ("down", self.down.len(), hidden * inner),
        ] {
            check_length(what, actual, expected)?;
        }
        Ok(())
    }
}

/// An error unless the lengths agree.
pub fn check_length(what: &'static str, actual: usize, expected: usize) -> Result<(), CpuError> {
    if actual == expected {
        return Ok(());
    }
    Err(CpuError::Length {
        what,
        actual,
        expected,
    })
}
