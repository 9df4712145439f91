//! What of a model's `config.json` decides how long its steps take.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
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
    n_routed_experts: Option<f64>,
    num_experts_per_tok: Option<f64>,
    moe_intermediate_size: Option<f64>,
    n_shared_experts: Option<f64>,
    first_k_dense_replace: Option<f64>,
    kv_lora_rank: Option<f64>,
    q_lora_rank: Option<f64>,
    #[serde(default)]
    qk_nope_head_dim: f64,
    #[serde(default)]
    qk_rope_head_dim: f64,
    #[serde(default)]
    v_head_dim: f64,
    #[serde(default)]
    layer_types: Vec<String>,
    quantization_config: Option<Quantization>,
}

#[derive(Debug, Deserialize)]
struct Quantization {
    #[serde(default)]
    quant_method: String,
}

/// Of the model in a folder, with weights and KV of 16 bits; weights that are stored in fp8 have 8.
///
/// # Errors
///
/// There is no `config.json`, or none of a model that is understood.
pub fn read_shape(folder: &Path) -> Result<ModelShape, SimulateError> {
    let path = folder.join("config.json");
    let fail = |reason: String| SimulateError::File {
        path: path.clone(),
        reason,
    };
    let text = std::fs::read_to_string(&path).map_err(|error| {
        fail(format!(
            "{error}; --model is a folder with a config.json, a hub id or smollm2-135m"
        ))
    })?;
    let known: Value = serde_json::from_str(&text).map_err(|error| {
        fail(format!(
            "{error}; fetch the model again: it must be a JSON object"
        ))
    })?;
    if !known.is_object() {
        return Err(fail("it must be a JSON object".to_owned()));
    }
    let config: ModelConfig =
        serde_json::from_value(known).map_err(|error| fail(format!("{error}; {OTHERS}")))?;
    config
        .shape()
        .map_err(|reason| fail(format!("{reason}; {OTHERS}")))
}

const OTHERS: &str = "models of the Llama family, with experts and with latent KV are understood; \
                      for others measure with `tasuki bench batch --steps`, and give --steps";

/// Attention of a layer: parameters, values that a token keeps, and the width that scores and
/// sums of a query have, together.
struct Attention {
    parameters: f64,
    kv_values: f64,
    width: f64,
}

impl ModelConfig {
    fn attention(&self) -> Attention {
        let (hidden, heads) = (self.hidden_size, self.num_attention_heads);
        if let Some(latent) = self.kv_lora_rank {
            // Queries are brought to the side of the latents, which all heads share.
            let query = self.qk_nope_head_dim + self.qk_rope_head_dim;
            let queries = match self.q_lora_rank {
                Some(rank) => rank * (hidden + heads * query),
                None => hidden * heads * query,
            };
            let latents = hidden * (latent + self.qk_rope_head_dim);
            let keys_and_values = latent * heads * (self.qk_nope_head_dim + self.v_head_dim);
            return Attention {
                parameters: queries + latents + keys_and_values + heads * self.v_head_dim * hidden,
                kv_values: latent + self.qk_rope_head_dim,
                width: heads * (latent + self.qk_rope_head_dim / 2.0),
            };
        }
        let head = self.head_dim.unwrap_or(hidden / heads);
        let (width, kv_width) = (
            heads * head,
            self.num_key_value_heads.unwrap_or(heads) * head,
        );
        Attention {
            parameters: hidden * (2.0 * width + 2.0 * kv_width),
            kv_values: 2.0 * kv_width,
            width,
        }
    }

    /// Why nothing can be said of such a model.
    fn check(&self) -> Result<(), String> {
        let positive = [
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("vocab_size", self.vocab_size),
            ("intermediate_size", self.intermediate_size),
            ("head_dim", self.head_dim.unwrap_or(1.0)),
            (
                "num_key_value_heads",
                self.num_key_value_heads.unwrap_or(1.0),
            ),
        ];
        if let Some((name, value)) = positive.iter().find(|(_, value)| *value <= 0.0) {
            return Err(format!("{name} is {value}, and must be above 0"));
        }
        let other = |kind: &&String| !kind.ends_with("attention") || kind.contains("linear");
        if let Some(kind) = self.layer_types.iter().find(other) {
            return Err(format!("it has layers of type {kind}"));
        }
        Ok(())
    }

    fn bytes_per_parameter(&self) -> Result<f64, String> {
        match &self.quantization_config {
            None => Ok(2.0),
            Some(known) if known.quant_method == "fp8" => Ok(1.0),
            Some(other) => Err(format!("its weights are of {}", other.quant_method)),
        }
    }

    fn shape(&self) -> Result<ModelShape, String> {
        self.check()?;
        let layers = self.num_hidden_layers;
        let attention = self.attention();
        let experts = self.num_experts.or(self.num_local_experts);
        let experts = experts.or(self.n_routed_experts).filter(|n| *n > 0.0);
        let mlp = 3.0 * self.hidden_size * self.intermediate_size;
        let inner = self.moe_intermediate_size.unwrap_or(self.intermediate_size);
        let expert = 3.0 * self.hidden_size * inner;
        let dense_layers = match experts {
            Some(_) => self.first_k_dense_replace.unwrap_or(0.0).min(layers),
            None => layers,
        };
        let shared = (layers - dense_layers) * self.n_shared_experts.unwrap_or(0.0) * expert;
        // A tied embedding is read once, by the head.
        let head = self.vocab_size * self.hidden_size;
        Ok(ModelShape {
            layers,
            hidden: self.hidden_size,
            dense_parameters: layers * attention.parameters + dense_layers * mlp + shared + head,
            expert_parameters: (layers - dense_layers) * expert * experts.unwrap_or(0.0),
            experts: experts.unwrap_or(1.0),
            experts_per_token: experts.map_or(0.0, |_| self.num_experts_per_tok.unwrap_or(2.0)),
            kv_bytes_per_token: 2.0 * layers * attention.kv_values,
            attention_width: attention.width,
            bytes_per_parameter: self.bytes_per_parameter()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: &str) -> ModelConfig {
        serde_json::from_str(json).unwrap()
    }

    fn shape(json: &str) -> ModelShape {
        config(json).shape().unwrap()
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
        let billions = parameters(&shape(qwen3_4b)) / 1e9;
        assert!((4.0..4.05).contains(&billions), "{billions}");
        assert_eq!(shape(qwen3_4b).kv_bytes_per_token, 147_456.0);
        let qwen3_30b = r#"{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "vocab_size": 151936, "intermediate_size": 6144, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768}"#;
        let embedding = 151_936.0 * 2_048.0;
        let billions = (parameters(&shape(qwen3_30b)) + embedding) / 1e9;
        assert!((30.0..31.0).contains(&billions), "{billions}");
    }

    #[test]
    fn latents_and_shared_experts_are_counted() {
        let deepseek_v2_lite = r#"{"hidden_size": 2048, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
            "kv_lora_rank": 512, "q_lora_rank": null, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128}"#;
        let shape = shape(deepseek_v2_lite);
        let embedding = 102_400.0 * 2_048.0;
        let billions = (parameters(&shape) + embedding) / 1e9;
        assert!((15.6..15.8).contains(&billions), "{billions}");
        assert_eq!(shape.kv_bytes_per_token, 2.0 * 27.0 * 576.0);
    }

    #[test]
    fn a_file_that_is_no_object_is_told_as_that() {
        let folder = tempfile::tempdir().unwrap();
        for (text, says) in [
            ("[1, 2]", "config.json: it must be a JSON object"),
            (r#"{"hidden_size": "#, "fetch the model again"),
            (
                "{}",
                "missing field `hidden_size`; models of the Llama family",
            ),
        ] {
            std::fs::write(folder.path().join("config.json"), text).unwrap();
            let error = read_shape(folder.path()).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let with = |more: &str| {
            let json = format!(
                r#"{{"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
                "vocab_size": 9, "intermediate_size": 16{more}}}"#
            );
            config(&json).shape().map(|shape| shape.bytes_per_parameter)
        };
        assert_eq!(with(""), Ok(2.0));
        let sliding = r#", "layer_types": ["sliding_attention", "full_attention"]"#;
        assert_eq!(with(sliding), Ok(2.0));
        assert_eq!(
            with(r#", "quantization_config": {"quant_method": "fp8"}"#),
            Ok(1.0)
        );
        for (more, said) in [
            (r#", "head_dim": 0"#, "head_dim is 0"),
            (
                r#", "layer_types": ["linear_attention"]"#,
                "linear_attention",
            ),
            (
                r#", "quantization_config": {"quant_method": "mxfp4"}"#,
                "mxfp4",
            ),
        ] {
            let error = with(more).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
