//! Fuzzing of what comes from outside: clients' bodies, workers' messages and streams, models'
//! answers. `make fuzz` runs it for long; the tests alone run a few thousand cases.

mod answers;
mod fields;
mod grammars;
mod grpc;
mod http;
mod sse;
