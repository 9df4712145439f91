//! Step times from a device's data sheet, where nothing is measured.
//!
//! A step takes as long as its bytes at the memory's bandwidth or its operations at the peak of
//! the arithmetic, whichever is longer, each by the share of it that engines reach, and something
//! for every layer. The shares are those of this project's dense steps on an H200 (a decode step
//! takes 1.40 times its bytes); on other devices they are a guess.

use super::Work;

/// A GPU, or a processor with the same figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Device {
    pub name: &'static str,
    pub memory_bytes: f64,
    pub bytes_per_s: f64,
    /// Dense, of 16-bit numbers.
    pub flops_per_s: f64,
    /// To another one of the same machine, in one direction.
    pub peer_bytes_per_s: f64,
}

/// Data sheets. Source: the makers' pages; SXM variants where there are several.
const DEVICES: [Device; 8] = [
    device("a100", 80e9, 2.04e12, 312e12, 300e9),
    device("h100", 80e9, 3.35e12, 989e12, 450e9),
    device("h200", 141e9, 4.8e12, 989e12, 450e9),
    device("b200", 180e9, 8.0e12, 2250e12, 900e9),
    device("l4", 24e9, 0.3e12, 121e12, 32e9),
    device("l40s", 48e9, 0.864e12, 362e12, 32e9),
    device("rtx4090", 24e9, 1.008e12, 165e12, 32e9),
    device("rtxpro6000", 96e9, 1.79e12, 504e12, 50e9),
];

const fn device(name: &'static str, memory: f64, bytes: f64, flops: f64, peer: f64) -> Device {
    Device {
        name,
        memory_bytes: memory,
        bytes_per_s: bytes,
        flops_per_s: flops,
        peer_bytes_per_s: peer,
    }
}

/// All that are known.
pub fn devices() -> impl Iterator<Item = Device> {
    DEVICES.into_iter()
}

impl Device {
    /// One of [`devices`], by its name or as a driver names it: words of `NVIDIA H100 80GB HBM3`
    /// that follow one another are the device's name.
    pub fn named(name: &str) -> Option<Self> {
        let name = name.to_ascii_lowercase();
        let words: Vec<&str> = name
            .split(|c: char| !c.is_ascii_alphanumeric())
            .filter(|word| !word.is_empty())
            .collect();
        let has = |device: &&Self| {
            (1..=words.len()).any(|count| {
                let mut parts = words.windows(count);
                parts.any(|part| part.concat() == device.name)
            })
        };
        DEVICES.iter().find(has).copied()
    }
}

/// What of a decoder decides how long its steps take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelShape {
    pub layers: f64,
    pub hidden: f64,
    /// Parameters that every token reads: attention, dense MLPs, the head.
    pub dense_parameters: f64,
    /// Parameters of all experts; 0 without.
    pub expert_parameters: f64,
    /// In a layer; 1 without.
    pub experts: f64,
    /// That a token goes through.
    pub experts_per_token: f64,
    /// Keys and values of one token, all layers.
    pub kv_bytes_per_token: f64,
    /// Query heads times their dimension.
    pub attention_width: f64,
    pub bytes_per_parameter: f64,
}

impl ModelShape {
    pub fn weight_bytes(&self) -> f64 {
        (self.dense_parameters + self.expert_parameters) * self.bytes_per_parameter
    }

    /// Share of the experts that so many tokens reach, if routing is even.
    fn touched(&self, tokens: f64) -> f64 {
        1.0 - (1.0 - self.experts_per_token / self.experts).powf(tokens)
    }
}

/// Bytes of memory that a step reads, by time: 1 / 1.40 of the data sheet's.
const BANDWIDTH_SHARE: f64 = 0.64;
/// Of the data sheet's operations that large GEMMs reach.
const COMPUTE_SHARE: f64 = 0.62;
/// Kernels of a layer that wait for one another.
const LAYER_S: f64 = 12e-6;
/// Two sums over the ranks of a divided layer.
const SUMS_S: f64 = 16e-6;

/// Steps of a model on a device, or on several that divide it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Roofline {
    pub device: Device,
    pub shape: ModelShape,
    pub tensor_parallel: u32,
}

impl Roofline {
    pub fn step_s(&self, work: &Work) -> f64 {
        let (shape, ranks) = (&self.shape, f64::from(self.tensor_parallel.max(1)));
        let tokens = work.sequences + work.prompt_tokens;
        if tokens <= 0.0 {
            return 0.0;
        }
        let experts = shape.expert_parameters * shape.touched(tokens);
        let weights = (shape.dense_parameters + experts) * shape.bytes_per_parameter;
        // A prompt's queries share what they read of its context.
        let context = work.prompt_squares / (2.0 * work.prompt_tokens.max(1.0));
        let kv = (work.kv_tokens + context) * shape.kv_bytes_per_token;
        let active = shape.dense_parameters
            + shape.expert_parameters * shape.experts_per_token / shape.experts;
        let attended = work.kv_tokens + work.prompt_squares / 2.0;
        let flops = 2.0 * active * tokens + 4.0 * shape.layers * shape.attention_width * attended;
        let memory_s = (weights + kv) / (self.device.bytes_per_s * BANDWIDTH_SHARE);
        let compute_s = flops / (self.device.flops_per_s * COMPUTE_SHARE);
        let sums_s = if ranks > 1.0 {
            SUMS_S + 2.0 * tokens * shape.hidden * 2.0 / self.device.peer_bytes_per_s
        } else {
            0.0
        };
        memory_s.max(compute_s) / ranks + shape.layers * (LAYER_S / ranks.sqrt() + sums_s)
    }

    /// Tokens of KV that fit beside the weights. `utilization`: of the memory.
    pub fn kv_tokens(&self, utilization: f64) -> f64 {
        let memory = self.device.memory_bytes * f64::from(self.tensor_parallel.max(1));
        // Activations and graphs.
        let free = memory * utilization * 0.95 - self.shape.weight_bytes();
        (free / self.shape.kv_bytes_per_token).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Qwen3-4B's.
    fn shape() -> ModelShape {
        ModelShape {
            layers: 36.0,
            hidden: 2560.0,
            dense_parameters: 4.02e9,
            expert_parameters: 0.0,
            experts: 1.0,
            experts_per_token: 0.0,
            kv_bytes_per_token: 147_456.0,
            attention_width: 4096.0,
            bytes_per_parameter: 2.0,
        }
    }

    fn roofline(tensor_parallel: u32) -> Roofline {
        Roofline {
            device: Device::named("H200").unwrap(),
            shape: shape(),
            tensor_parallel,
        }
    }

    #[test]
    fn devices_are_known_by_the_names_of_their_drivers() {
        let named = |name| Device::named(name).map(|device| device.name);
        for (name, device) in [
            ("H200", Some("h200")),
            ("NVIDIA H100 80GB HBM3", Some("h100")),
            ("NVIDIA A100-SXM4-80GB", Some("a100")),
            ("NVIDIA L4", Some("l4")),
            ("NVIDIA L40", None),
            ("NVIDIA GeForce RTX 4090", Some("rtx4090")),
            (
                "NVIDIA RTX PRO 6000 Blackwell Server Edition",
                Some("rtxpro6000"),
            ),
            ("", None),
        ] {
            assert_eq!(named(name), device, "{name}");
        }
    }

    #[test]
    fn decodes_are_bound_by_memory_and_prompts_by_compute() {
        let decode = |sequences: f64, kv_tokens: f64| {
            roofline(1).step_s(&Work {
                sequences,
                kv_tokens,
                ..Work::default()
            })
        };
        assert!(decode(2.0, 1_540.0) < 1.1 * decode(1.0, 770.0));
        let prompt = |tokens: f64| {
            let prompt_squares = tokens * tokens;
            roofline(1).step_s(&Work {
                prompt_tokens: tokens,
                prompt_squares,
                ..Work::default()
            })
        };
        assert!(prompt(4_096.0) > 1.8 * prompt(2_048.0));
    }

    #[test]
    fn two_devices_are_faster_than_one_and_not_twice_as_fast() {
        let work = Work {
            sequences: 32.0,
            kv_tokens: 32_000.0,
            ..Work::default()
        };
        let (one, two) = (roofline(1).step_s(&work), roofline(2).step_s(&work));
        assert!(two < one && 2.0 * two > one, "{one} {two}");
        assert!(roofline(2).kv_tokens(0.9) > 2.0 * roofline(1).kv_tokens(0.9));
    }

    #[test]
    fn few_tokens_reach_few_experts() {
        let shape = ModelShape {
            experts: 128.0,
            experts_per_token: 8.0,
            expert_parameters: 29e9,
            ..shape()
        };
        assert!((shape.touched(1.0) - 8.0 / 128.0).abs() < 1e-9);
        assert!((112.0 / 128.0 - shape.touched(32.0)).abs() < 0.01);
    }
}
