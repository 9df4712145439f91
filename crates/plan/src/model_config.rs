//! What of a model's `config.json` decides how long its steps take.

use std::path::Path;

use serde::Deserialize;
use tasuki_sim::steps::ModelShape;

use crate::error::SimulateError;

#[derive(Debug, Deserialize)]
struct ModelConfig {
    hidden_size: f64,
    num_hidden_layers: f64,
    num_attention_heads: f64,
    vocab_size: f64,
    intermediate_size: f64,
    num_key_value_heads: Option<f64>,
    head_dim: Option<f64>,
    num_experts: Option<f64>,
    num_local_experts: Option<f64>,
    num_experts_per_tok: Option<f64>,
    moe_intermediate_size: Option<f64>,
}

/// Of the model in a folder, with weights and KV of 16 bits.
///
/// # Errors
///
/// There is no `config.json`, or none of the Llama family's kind.
pub fn read_shape(folder: &Path) -> Result<ModelShape, SimulateError> {
    let path = folder.join("config.json");
    let fail = |reason: String| SimulateError::File {
        path: path.clone(),
        reason,
    };
    let text = std::fs::read_to_string(&path).map_err(|error| fail(error.to_string()))?;
    let config: ModelConfig = serde_json::from_str(&text).map_err(|error| {
        fail(format!(
            "{error}; models of the Llama family are understood"
        ))
    })?;
    Ok(config.shape())
}

impl ModelConfig {
    fn shape(&self) -> ModelShape {
        let layers = self.num_hidden_layers;
        let head = self
            .head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads);
        let width = self.num_attention_heads * head;
        let kv_width = self.num_key_value_heads.unwrap_or(self.num_attention_heads) * head;
        let attention = self.hidden_size * (2.0 * width + 2.0 * kv_width);
        let experts = self
            .num_experts
            .or(self.num_local_experts)
            .filter(|n| *n > 0.0);
        let inner = match experts {
            Some(_) => self.moe_intermediate_size.unwrap_or(self.intermediate_size),
            None => self.intermediate_size,
        };
        let mlp = 3.0 * self.hidden_size * inner;
        // A tied embedding is read once, by the head.
        let head_parameters = self.vocab_size * self.hidden_size;
        let dense_mlp = if experts.is_some() { 0.0 } else { mlp };
        ModelShape {
            layers,
            hidden: self.hidden_size,
            dense_parameters: layers * (attention + dense_mlp) + head_parameters,
            expert_parameters: layers * mlp * experts.unwrap_or(0.0),
            experts: experts.unwrap_or(1.0),
            experts_per_token: experts.map_or(0.0, |_| self.num_experts_per_tok.unwrap_or(2.0)),
            kv_bytes_per_token: 2.0 * 2.0 * layers * kv_width,
            attention_width: width,
            bytes_per_parameter: 2.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: &str) -> ModelConfig {
        serde_json::from_str(json).unwrap()
    }

    /// Without an embedding of its own.
    fn parameters(shape: &ModelShape) -> f64 {
        shape.dense_parameters + shape.expert_parameters
    }

    #[test]
    fn parameters_are_those_that_the_makers_tell() {
        let qwen3_4b = r#"{"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32,
            "vocab_size": 151936, "intermediate_size": 9728, "num_key_value_heads": 8,
            "head_dim": 128}"#;
        let billions = parameters(&config(qwen3_4b).shape()) / 1e9;
        assert!((4.0..4.05).contains(&billions), "{billions}");
        assert_eq!(config(qwen3_4b).shape().kv_bytes_per_token, 147_456.0);
        let qwen3_30b = r#"{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "vocab_size": 151936, "intermediate_size": 6144, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768}"#;
        let embedding = 151_936.0 * 2_048.0;
        let billions = (parameters(&config(qwen3_30b).shape()) + embedding) / 1e9;
        assert!((30.0..31.0).contains(&billions), "{billions}");
    }
}
