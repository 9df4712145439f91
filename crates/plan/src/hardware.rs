//! From the options to workers: how long their steps take, and how much they hold.

use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use tasuki_core::{Rates, Role};
use tasuki_sim::steps::{Device, Roofline, StepModel, devices};
use tasuki_sim::{Limits, LinkSpec, NetworkSpec, WorkerConfig};

use crate::args::{DeviceKind, HardwareArgs, TopologyArgs};
use crate::error::SimulateError;
use crate::model_config::read_shape;
use crate::steps_file::StepsFile;

/// Longest request unless it is said: more is rarely asked for.
const LONGEST: u32 = 131_072;
/// A share by which a larger step may take less time before a table is called unsteady.
const UNSTEADY: f64 = 0.1;
const MOST_WORKERS: u32 = 20_000;
/// From the last block there until its sequence may be scheduled.
const HANDOFF_S: f64 = 1e-3;
/// Of a GPU's memory, for weights and KV.
const UTILIZATION: f64 = 0.9;

/// Step times as coefficients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepRates(pub Rates);

impl FromStr for StepRates {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let mut rates = Rates {
            step_s: 0.0,
            sequence_s: 0.0,
            kv_token_s: 0.0,
            prompt_step_s: 0.0,
            prompt_token_s: 0.0,
            prompt_square_s: 0.0,
        };
        for part in given.split(',') {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let (place, unit) = match name.trim() {
                "step-ms" => (&mut rates.step_s, 1e-3),
                "sequence-us" => (&mut rates.sequence_s, 1e-6),
                "kv-token-ns" => (&mut rates.kv_token_s, 1e-9),
                "prompt-step-ms" => (&mut rates.prompt_step_s, 1e-3),
                "prompt-token-us" => (&mut rates.prompt_token_s, 1e-6),
                "prompt-square-ns" => (&mut rates.prompt_square_s, 1e-9),
                other => {
                    return Err(format!(
                        "{other:?} is unknown; it is a list of step-ms, sequence-us, kv-token-ns, \
                         prompt-step-ms, prompt-token-us and prompt-square-ns"
                    ));
                }
            };
            let number: Result<f64, _> = value.trim().parse();
            match number {
                Ok(number) if number >= 0.0 && number.is_finite() => *place = number * unit,
                _ => return Err(format!("{part:?} has no number of at least 0")),
            }
        }
        if rates.step_s <= 0.0 || rates.prompt_token_s <= 0.0 {
            return Err("step-ms and prompt-token-us must be above 0".to_owned());
        }
        Ok(Self(rates))
    }
}

/// All that is known of the workers.
#[derive(Debug, Clone)]
pub struct Hardware {
    pub steps: Arc<StepModel>,
    pub limits: Limits,
    pub kv_bytes_per_token: f64,
    pub network: NetworkSpec,
    pub message_s: f64,
    /// See [`tasuki_sim::Config::handoff_s`].
    pub handoff_s: f64,
    /// In results.
    pub name: String,
    /// What workers serve, as `tasuki serve --model` takes it; `None`: unknown.
    pub model: Option<String>,
    /// Workers have GPUs.
    pub on_gpus: bool,
    /// Where step times are from, for the reader.
    pub source: String,
}

/// What a source of step times says besides.
pub struct Source {
    pub steps: StepModel,
    pub name: String,
    pub told: String,
    /// See [`Hardware::model`].
    pub model: Option<String>,
    pub cpu: bool,
    pub block_size: Option<u32>,
    pub num_blocks: Option<u32>,
    pub max_model_len: Option<u32>,
    pub kv_bytes_per_token: Option<f64>,
    pub link: Option<LinkSpec>,
    pub handoff_s: Option<f64>,
    /// See [`Limits::lead_s`].
    pub lead: Option<PerStep>,
    /// See [`Limits::between_s`].
    pub between: PerStep,
    /// See [`Hardware::message_s`].
    pub message_s: Option<f64>,
}

/// What a step of a worker takes besides, in seconds, and for each sequence that it decodes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct PerStep {
    pub step_s: f64,
    pub sequence_s: f64,
}

impl Hardware {
    /// # Errors
    ///
    /// Nothing says how long steps take, or what says it cannot be used.
    pub fn new(args: &HardwareArgs) -> Result<Self, SimulateError> {
        Self::of(args, source(args)?)
    }

    /// With step times from elsewhere, unless the options have a source.
    ///
    /// # Errors
    ///
    /// As [`Hardware::new`].
    pub fn or(args: &HardwareArgs, otherwise: Source) -> Result<Self, SimulateError> {
        let given = args.steps.is_some() || args.rates.is_some() || args.gpu.is_some();
        Self::of(args, if given { source(args)? } else { otherwise })
    }

    fn of(args: &HardwareArgs, source: Source) -> Result<Self, SimulateError> {
        let cpu = args
            .device
            .map_or(source.cpu, |kind| kind == DeviceKind::Cpu);
        let kv_bytes_per_token = args
            .kv_bytes_per_token
            .or(source.kv_bytes_per_token)
            .unwrap_or(131_072.0);
        let default = if cpu {
            Limits::cpu(2, 2)
        } else {
            Limits::gpu(2, 2)
        };
        let block_size = args
            .block_size
            .or(source.block_size)
            .unwrap_or(default.block_size);
        let measured = source.num_blocks.map(|blocks| {
            let tokens = u64::from(blocks) * u64::from(source.block_size.unwrap_or(block_size));
            u32::try_from(tokens / u64::from(block_size)).unwrap_or(u32::MAX)
        });
        let num_blocks = args.num_blocks.or(measured).unwrap_or(12_288);
        let half = u64::from(num_blocks / 2) * u64::from(block_size);
        let half = u32::try_from(half).unwrap_or(u32::MAX);
        let max_model_len = args
            .max_model_len
            .unwrap_or_else(|| half.min(source.max_model_len.unwrap_or(LONGEST)));
        let between = match args.between_steps_ms {
            Some(ms) => PerStep {
                step_s: ms / 1e3,
                sequence_s: 0.0,
            },
            None => source.between,
        };
        let limits = Limits {
            num_blocks,
            block_size,
            max_model_len,
            max_batched_tokens: args
                .max_batched_tokens
                .unwrap_or(default.max_batched_tokens),
            max_running_requests: args
                .max_running_requests
                .unwrap_or(default.max_running_requests),
            itl_target_s: match args.itl_target_ms {
                Some(ms) => (ms > 0.0).then_some(ms / 1e3),
                None => default.itl_target_s,
            },
            prefix_caching: !args.no_prefix_caching,
            lead_s: source.lead.map_or(default.lead_s, |lead| lead.step_s),
            lead_sequence_s: source.lead.map_or(0.0, |lead| lead.sequence_s),
            between_s: between.step_s,
            between_sequence_s: between.sequence_s,
            ..default
        };
        let needed = 2 * limits.max_request_blocks();
        if num_blocks < needed {
            return Err(SimulateError::Pool {
                blocks: num_blocks,
                tokens: max_model_len,
                needed,
            });
        }
        let link = source.link.unwrap_or(NetworkSpec::default().within_host);
        let within_host = LinkSpec {
            bytes_per_s: args.link_gb_s.map_or(link.bytes_per_s, |gb| gb * 1e9),
            latency_s: args.link_latency_ms.map_or(link.latency_s, |ms| ms / 1e3),
        };
        let between_hosts = LinkSpec {
            bytes_per_s: args.host_link_gb_s * 1e9,
            latency_s: within_host.latency_s + 0.2e-3,
        };
        let message_s = args.message_ms.map(|ms| ms / 1e3).or(source.message_s);
        Ok(Self {
            steps: Arc::new(source.steps),
            limits,
            kv_bytes_per_token,
            network: NetworkSpec {
                within_host,
                between_hosts,
            },
            message_s: message_s.unwrap_or(if cpu { 2e-3 } else { 0.5e-3 }),
            handoff_s: args
                .handoff_ms
                .map(|ms| ms / 1e3)
                .or(source.handoff_s)
                .unwrap_or(HANDOFF_S),
            name: source.name,
            model: source.model,
            on_gpus: !cpu,
            source: source.told,
        })
    }

    /// The workers of a topology, prefill workers first.
    ///
    /// # Errors
    ///
    /// They are too many, or cannot serve a request.
    pub fn workers(&self, topology: &TopologyArgs) -> Result<Vec<WorkerConfig>, SimulateError> {
        let TopologyArgs {
            prefill, decode, ..
        } = *topology;
        let mixed = topology.mixed();
        let workers = prefill.saturating_add(decode).saturating_add(mixed);
        let half = mixed == 0 && (prefill == 0 || decode == 0);
        if workers > MOST_WORKERS || half {
            return Err(SimulateError::Workers { workers });
        }
        let class: Arc<str> = self.name.as_str().into();
        // A host has its part of every role, as launchers spread them.
        let hosts = workers.div_ceil(topology.workers_per_host);
        let mut configs = Vec::with_capacity(workers as usize);
        for (role, count) in [
            (Role::Prefill, prefill),
            (Role::Decode, decode),
            (Role::Mixed, mixed),
        ] {
            for index in 0..count {
                configs.push(WorkerConfig {
                    role,
                    host: index % hosts,
                    class: Arc::clone(&class),
                    steps: Arc::clone(&self.steps),
                    limits: self.limits,
                });
            }
        }
        Ok(configs)
    }
}

fn source(args: &HardwareArgs) -> Result<Source, SimulateError> {
    if let Some(path) = &args.steps {
        let file = StepsFile::read(path)?;
        let table = file.table(path)?;
        let mut told = format!("steps measured, {}", path.display());
        if file.interrupted {
            told += "; the measurement was interrupted: it has fewer rounds, and of a GPU neither \
                     launches nor what lies between steps";
        }
        if let Some(reason) = &file.failed {
            told += &format!("; the measurement failed, so steps may be missing: {reason}");
        }
        let drop = table.largest_drop();
        if drop > UNSTEADY {
            told += &format!(
                "; they are unsteady: a step took {:.0}% less time than one with less in it (measure \
                 again on a quiet machine)",
                100.0 * drop
            );
        }
        let between = file.between();
        if between != PerStep::default() {
            told += &format!(
                "; between two steps {:.2} ms and {:.0} us for each sequence",
                1e3 * between.step_s,
                1e6 * between.sequence_s
            );
        }
        return Ok(Source {
            lead: file.lead(&table),
            steps: StepModel::Table(table),
            name: file.label.clone(),
            told,
            model: Some(file.model.clone()).filter(|model| !model.is_empty()),
            cpu: file.is_cpu(),
            block_size: Some(file.block_size()),
            num_blocks: Some(file.num_blocks()),
            kv_bytes_per_token: Some(file.kv_bytes_per_token()),
            link: file.link(),
            max_model_len: None,
            handoff_s: None,
            between,
            message_s: file.message_s(),
        });
    }
    if let Some(StepRates(rates)) = args.rates {
        return Ok(Source {
            steps: StepModel::Rates(rates),
            name: "rates".to_owned(),
            told: "steps by the coefficients of --rates".to_owned(),
            model: None,
            cpu: false,
            block_size: None,
            num_blocks: None,
            kv_bytes_per_token: None,
            link: None,
            max_model_len: None,
            handoff_s: None,
            lead: None,
            between: PerStep::default(),
            message_s: None,
        });
    }
    let given = args.gpu.as_ref().ok_or(SimulateError::NoSteps)?;
    let device = Device::named(given).ok_or_else(|| SimulateError::UnknownGpu {
        given: given.clone(),
        known: devices()
            .map(|device| device.name)
            .collect::<Vec<_>>()
            .join(", "),
    })?;
    let device = Device {
        memory_bytes: args
            .gpu_memory_gb
            .map_or(device.memory_bytes, |gb| gb * 1e9),
        ..device
    };
    let model = args.model.as_ref().ok_or(SimulateError::NoModel)?;
    let folder = args.model_config.as_deref().unwrap_or(Path::new(model));
    let roofline = Roofline {
        device,
        shape: read_shape(folder)?,
        tensor_parallel: args.tensor_parallel,
    };
    let tokens = roofline.kv_tokens(UTILIZATION);
    let block_size = args.block_size.unwrap_or(Limits::gpu(2, 2).block_size);
    let blocks = (tokens / f64::from(block_size)) as u32;
    if blocks < 16 {
        return Err(SimulateError::TooLarge {
            weights_gb: roofline.shape.weight_bytes() / 1e9,
            gpu: device.name.to_owned(),
            gpus: args.tensor_parallel,
        });
    }
    let shape = roofline.shape;
    Ok(Source {
        steps: StepModel::Roofline(roofline),
        name: format!("{} x{}", device.name, args.tensor_parallel),
        told: format!(
            "an estimate from the data sheet of {}; nothing was measured, and step times may be \
             off by a half: `tasuki bench batch --steps` on the real one measures them",
            device.name
        ),
        model: Some(model.clone()),
        cpu: false,
        block_size: Some(block_size),
        num_blocks: Some(blocks),
        kv_bytes_per_token: Some(shape.kv_bytes_per_token),
        link: Some(LinkSpec {
            bytes_per_s: 0.4 * device.peer_bytes_per_s,
            ..NetworkSpec::default().within_host
        }),
        max_model_len: None,
        handoff_s: None,
        lead: None,
        between: PerStep::default(),
        message_s: None,
    })
}
