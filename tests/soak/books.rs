//! Compares, during the soak, each client's result with the executions, and forgets requests on which both
//! agree.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Instant, sleep};
use warden_rig::Trouble;
use warden_rig::ledger::{End, Ledger, Line, Tail};
use warden_rig::storm::{Execution, Told, audit};

use crate::clients::Ended;

/// Time after which a process has written its last line of a request.
const SETTLED: Duration = Duration::from_secs(5);
/// Most contradictions that are printed.
pub(crate) const TOLD: usize = 12;

/// Process that executed a request; a reused PID is another process.
type Process = usize;

pub(crate) struct Books {
    tail: Tail,
    executions: HashMap<String, Vec<(Process, Execution)>>,
    /// Requests in execution, by PID and ordinal: name, and index among its executions.
    open: HashMap<(i32, u64), (String, usize)>,
    /// Process of each PID, and the ordinals that it has begun.
    processes: HashMap<i32, (Process, BTreeSet<u64>)>,
    last: Vec<usize>,
    lines: usize,
    account: Account,
}

#[derive(Debug, Default)]
pub(crate) struct Account {
    counts: BTreeMap<&'static str, u64>,
    again: u64,
    twice: u64,
    processes: usize,
    wrong: Vec<String>,
    wrongs: usize,
}

impl Account {
    pub(crate) fn words(&self) -> String {
        let all: u64 = self.counts.values().sum();
        let mut text = format!("{all} requests: {:?}", self.counts);
        let _infallible = write!(
            text,
            "; {} executed once more, {} told to come again by a restart, {} processes",
            self.twice, self.again, self.processes
        );
        text
    }

    pub(crate) fn problem(&self) -> Option<String> {
        let few = self.counts.get("whole").copied().unwrap_or_default() < 10;
        match () {
            () if self.wrongs > 0 => {
                Some(format!("{} contradictions:\n{}", self.wrongs, self.wrong.join("\n")))
            }
            () if few => Some("hardly anything was asked".to_owned()),
            () => None,
        }
    }

    fn accuse(&mut self, why: String) {
        crate::say(&why);
        self.wrongs += 1;
        if self.wrong.len() < TOLD {
            self.wrong.push(why);
        }
    }
}

/// Ordinals follow the order of arrival, and requests begin about in that order. A repeated ordinal, or one
/// far behind, belongs to another process with the same PID.
fn is_another(done: &BTreeSet<u64>, ordinal: u64) -> bool {
    const OUT_OF_ORDER: u64 = 100;
    done.contains(&ordinal) || done.last().is_some_and(|last| ordinal + OUT_OF_ORDER < *last)
}

impl Books {
    pub(crate) fn of(ledger: &Ledger) -> Self {
        Self {
            tail: ledger.tail(),
            executions: HashMap::new(),
            open: HashMap::new(),
            processes: HashMap::new(),
            last: Vec::new(),
            lines: 0,
            account: Account::default(),
        }
    }

    /// Compares until all clients have left.
    pub(crate) async fn keep(mut self, mut results: UnboundedReceiver<Ended>) -> Result<Account, Trouble> {
        let mut waiting: VecDeque<Ended> = VecDeque::new();
        while !results.is_closed() || !results.is_empty() || !waiting.is_empty() {
            sleep(Duration::from_millis(500)).await;
            while let Ok(ended) = results.try_recv() {
                waiting.push_back(ended);
            }
            let before = Instant::now();
            self.read()?;
            while waiting.front().is_some_and(|ended| before > ended.at + SETTLED) {
                let Some(next) = waiting.pop_front() else { break };
                self.settle(&next);
            }
        }
        self.account.processes = self.last.len();
        let foreign: Vec<String> = self.executions.keys().take(TOLD).cloned().collect();
        for id in foreign {
            self.account.accuse(format!("{id}: executed, and nobody asked for it"));
        }
        Ok(self.account)
    }

    fn read(&mut self) -> Result<(), Trouble> {
        for line in self.tail.fresh()? {
            self.take(line);
        }
        Ok(())
    }

    fn take(&mut self, line: Line) {
        let at = self.lines;
        self.lines += 1;
        let begins = line.event == "begun";
        let known =
            self.processes.get(&line.pid).filter(|(_, done)| !begins || !is_another(done, line.ordinal));
        let process = if let Some((process, _)) = known {
            *process
        } else {
            self.last.push(at);
            self.open.retain(|(pid, _), _| *pid != line.pid);
            self.processes.insert(line.pid, (self.last.len() - 1, BTreeSet::new()));
            self.last.len() - 1
        };
        self.last[process] = at;
        let key = (line.pid, line.ordinal);
        if begins {
            if let Some((_, done)) = self.processes.get_mut(&line.pid) {
                done.insert(line.ordinal);
            }
            // llama-warden sends these requests itself, to analyse a request or to warm a process.
            if line.id.ends_with('?') || line.id == "-" {
                return;
            }
            let unseen = line.stream && line.head_first;
            let one = Execution { end: End::Open, meaning: line.meaning, unseen, between: (at, at) };
            let all = self.executions.entry(line.id.clone()).or_default();
            all.push((process, one));
            self.open.insert(key, (line.id, all.len() - 1));
            return;
        }
        let Some((id, index)) = self.open.get(&key) else { return };
        let Some((_, one)) = self.executions.get_mut(id).and_then(|all| all.get_mut(*index)) else { return };
        one.unseen = false;
        match line.event.as_str() {
            "head" => return,
            "finished" => one.end = End::Finished,
            _ => one.end = End::Cancelled,
        }
        self.open.remove(&key);
    }

    fn settle(&mut self, ended: &Ended) {
        let sent = &ended.sent;
        *self.account.counts.entry(sent.label()).or_default() += 1;
        self.account.again += ended.again;
        let mut executed = Vec::new();
        for (process, mut one) in self.executions.remove(&sent.id).unwrap_or_default() {
            one.between.1 = self.last[process];
            executed.push(one);
        }
        self.account.twice += u64::from(executed.len() > 1);
        if let Err(why) = audit(sent, &executed, true) {
            self.account.accuse(format!("{} {}: {why}", sent.id, sent.request));
        }
        // No request may fail; refused and cut requests have failed.
        if let Ok(Told::Refused { .. } | Told::Cut) = &sent.told {
            self.account.accuse(format!("{} {}: {:?}", sent.id, sent.request, sent.told));
        }
    }
}
