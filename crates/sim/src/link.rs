//! The ways on which KV moves: bandwidth, latency, and transfers that share them.
//!
//! A worker sends and receives at its link's bandwidth. A transfer gets an equal part of its
//! sender's and of its receiver's, whichever is less; what another transfer cannot use of its part
//! is not given out again.

use crate::time::Time;

/// One kind of way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkSpec {
    pub bytes_per_s: f64,
    /// From the order of a transfer to its first byte, and of a message between workers.
    pub latency_s: f64,
}

/// Links between workers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NetworkSpec {
    pub within_host: LinkSpec,
    pub between_hosts: LinkSpec,
}

impl Default for NetworkSpec {
    /// NVLink, and 400 Gbit/s.
    fn default() -> Self {
        Self {
            within_host: LinkSpec {
                bytes_per_s: 150e9,
                latency_s: 0.5e-3,
            },
            between_hosts: LinkSpec {
                bytes_per_s: 40e9,
                latency_s: 0.7e-3,
            },
        }
    }
}

pub type TransferId = u32;

/// One transfer.
#[derive(Debug, Clone)]
struct Transfer {
    from: u32,
    to: u32,
    left_bytes: f64,
    bytes_per_s: f64,
    /// As of when `left_bytes` holds.
    since: Time,
    /// Changes with the time of its end.
    number: u32,
    most_bytes_per_s: f64,
}

/// A transfer whose end is at another time now: its id, number and end.
pub type Rescheduled = (TransferId, u32, Time);

/// Transfers of all workers.
#[derive(Debug)]
pub struct Network {
    spec: NetworkSpec,
    hosts: Vec<u32>,
    /// Of each worker: transfers out and in.
    busy: Vec<[Vec<TransferId>; 2]>,
    transfers: Vec<Option<Transfer>>,
    free: Vec<TransferId>,
    numbers: u32,
    /// Factor of all bandwidths: 1 is normal.
    pub speed: f64,
    pub rescheduled: Vec<Rescheduled>,
    pub moved_bytes: f64,
}

impl Network {
    /// `hosts`: of each worker.
    pub fn new(spec: NetworkSpec, hosts: Vec<u32>) -> Self {
        Self {
            spec,
            busy: vec![[Vec::new(), Vec::new()]; hosts.len()],
            hosts,
            transfers: Vec::new(),
            free: Vec::new(),
            numbers: 0,
            speed: 1.0,
            rescheduled: Vec::new(),
            moved_bytes: 0.0,
        }
    }

    fn way(&self, from: u32, to: u32) -> LinkSpec {
        if self.hosts[from as usize] == self.hosts[to as usize] {
            self.spec.within_host
        } else {
            self.spec.between_hosts
        }
    }

    /// Of a message between two workers.
    pub fn latency_s(&self, from: u32, to: u32) -> f64 {
        self.way(from, to).latency_s
    }

    /// Begins a transfer; its end is in `rescheduled`, and of all that it slows down.
    pub fn begin(&mut self, from: u32, to: u32, bytes: f64, now: Time) -> TransferId {
        let way = self.way(from, to);
        self.moved_bytes += bytes;
        let transfer = Transfer {
            from,
            to,
            left_bytes: bytes + way.latency_s * way.bytes_per_s * self.speed,
            bytes_per_s: 0.0,
            since: now,
            number: 0,
            most_bytes_per_s: way.bytes_per_s,
        };
        let id = match self.free.pop() {
            Some(id) => {
                self.transfers[id as usize] = Some(transfer);
                id
            }
            None => {
                self.transfers.push(Some(transfer));
                (self.transfers.len() - 1) as TransferId
            }
        };
        self.busy[from as usize][0].push(id);
        self.busy[to as usize][1].push(id);
        self.share(from, to, now);
        id
    }

    /// Whether the event of that number is the end of the transfer.
    pub fn is_end(&self, id: TransferId, number: u32) -> bool {
        let transfer = self.transfers[id as usize].as_ref();
        transfer.is_some_and(|transfer| transfer.number == number)
    }

    /// A transfer ends, or is given up.
    pub fn end(&mut self, id: TransferId, now: Time) {
        let Some(transfer) = self.transfers[id as usize].take() else {
            return;
        };
        self.free.push(id);
        self.busy[transfer.from as usize][0].retain(|&other| other != id);
        self.busy[transfer.to as usize][1].retain(|&other| other != id);
        self.share(transfer.from, transfer.to, now);
    }

    /// The bandwidth of all links changes by a factor.
    pub fn set_speed(&mut self, speed: f64, now: Time) {
        self.speed = speed;
        for worker in 0..self.hosts.len() as u32 {
            self.share(worker, worker, now);
        }
    }

    /// Divides the links of a sender and a receiver anew.
    fn share(&mut self, from: u32, to: u32, now: Time) {
        let ways = [(from, 0), (to, 1)];
        for (worker, direction) in ways {
            for at in 0..self.busy[worker as usize][direction].len() {
                self.reschedule(self.busy[worker as usize][direction][at], now);
            }
        }
    }

    fn reschedule(&mut self, id: TransferId, now: Time) {
        let Some(transfer) = &mut self.transfers[id as usize] else {
            return;
        };
        let out = self.busy[transfer.from as usize][0].len();
        let inward = self.busy[transfer.to as usize][1].len();
        let rate = transfer.most_bytes_per_s * self.speed / out.max(inward).max(1) as f64;
        if rate == transfer.bytes_per_s {
            return;
        }
        let passed_s = now.s_since(transfer.since);
        transfer.left_bytes = (transfer.left_bytes - transfer.bytes_per_s * passed_s).max(0.0);
        transfer.since = now;
        transfer.bytes_per_s = rate;
        self.numbers = self.numbers.wrapping_add(1);
        transfer.number = self.numbers;
        let ends = now.plus_s(transfer.left_bytes / rate.max(1e-3));
        self.rescheduled.push((id, transfer.number, ends));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network() -> Network {
        let spec = NetworkSpec {
            within_host: LinkSpec {
                bytes_per_s: 100.0,
                latency_s: 0.0,
            },
            between_hosts: LinkSpec {
                bytes_per_s: 10.0,
                latency_s: 0.5,
            },
        };
        Network::new(spec, vec![0, 0, 0, 1])
    }

    /// Runs all transfers to their ends.
    fn ends(network: &mut Network) -> Vec<(TransferId, f64)> {
        let mut ended = Vec::new();
        let mut due: Vec<Rescheduled> = Vec::new();
        loop {
            due.append(&mut network.rescheduled);
            due.sort_by_key(|event| std::cmp::Reverse(event.2));
            let Some((id, number, at)) = due.pop() else {
                ended.sort_by(|a: &(TransferId, f64), b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
                return ended;
            };
            if network.is_end(id, number) {
                network.end(id, at);
                ended.push((id, at.as_s()));
            }
        }
    }

    #[test]
    fn transfers_share_what_they_have_in_common() {
        let mut network = network();
        let one = network.begin(0, 1, 100.0, Time::ZERO);
        let two = network.begin(0, 2, 50.0, Time::ZERO);
        // Half each until the second is through.
        assert_eq!(ends(&mut network), [(two, 1.0), (one, 1.5)]);
        let one = network.begin(0, 1, 100.0, Time::ZERO);
        let two = network.begin(1, 2, 100.0, Time::ZERO);
        assert_eq!(ends(&mut network), [(one, 1.0), (two, 1.0)]);
        // Two send to one.
        let one = network.begin(0, 2, 100.0, Time::ZERO);
        let two = network.begin(1, 2, 100.0, Time::ZERO);
        assert_eq!(ends(&mut network), [(one, 2.0), (two, 2.0)]);
    }

    #[test]
    fn another_machine_is_further_away_and_a_slow_link_slower() {
        let mut network = network();
        network.begin(0, 3, 10.0, Time::ZERO);
        assert_eq!(ends(&mut network)[0].1, 1.5);
        let id = network.begin(0, 1, 100.0, Time::ZERO);
        network.set_speed(0.5, Time::from_s(0.5));
        assert_eq!(ends(&mut network), [(id, 1.5)]);
        // Latency is as long on a slow link.
        network.begin(0, 3, 10.0, Time::ZERO);
        assert_eq!(ends(&mut network)[0].1, 2.5);
        assert_eq!(network.moved_bytes, 10.0 + 100.0 + 10.0);
    }
}
