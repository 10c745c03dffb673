//! The fleet goes on in another instance of ourselves, with the processes that there are.
//!
//! ```text
//!   this one:  serves ── freeze ── will ──────────────────── let go ── sees its requests off ── disbanded
//!                                    │                         ^ │ counts, until there are none
//!   the next:               starts ──┴── adopts, probes ── ready ┴── begins ── decides ...
//! ```
//!
//! Between the freezing and the letting go nobody decides anything; requests go on here as ever.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::Instant;
use warden_policies::lifecycle::Phase;
use warden_policies::{GenerationId, ModelName, Work};

use super::Fleet;
use super::roster::Handle;
use crate::clock::now_of_machine;
use crate::error::Denied;
use crate::lease::Lease;
use crate::lease::queue::{Elsewhere, Tally};
use crate::lease::refused::Refused;
use crate::model::bequeath::{ModelWill, WillRecord};
use crate::model::context::Since;
use crate::model::{Control, Message};
use crate::process::heir::{Gate, Heir, HeirRecord};
use crate::process::settings::SetElsewhere;
use crate::sync::lock;

/// How often a fleet is asked again that is busy.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// What a fleet leaves to the next one.
#[derive(Debug)]
pub struct FleetWill {
    record: FleetRecord,
    models: Vec<ModelWill>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct FleetRecord {
    /// When the first fleet began, by the machine's clock that never jumps.
    began: Duration,
    generations: u64,
}

/// One piece of a will as it is written: all of them, with the files of each, are the will.
#[derive(Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WillPiece(Piece);

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Piece {
    Fleet(FleetRecord),
    Model(Box<WillRecord>),
    /// A process of the last model, with its files.
    Process(Box<HeirRecord>),
}

impl FleetWill {
    /// As it is sent: each piece with its files, which are at most three.
    pub fn into_pieces(self) -> impl Iterator<Item = (WillPiece, Vec<OwnedFd>)> {
        let model = |will: ModelWill| {
            let heirs = will.heirs.into_iter();
            let heirs = heirs.map(|heir| (Piece::Process(Box::new(heir.record)), heir.files));
            std::iter::once((Piece::Model(Box::new(will.record)), Vec::new())).chain(heirs)
        };
        std::iter::once((Piece::Fleet(self.record), Vec::new()))
            .chain(self.models.into_iter().flat_map(model))
            .map(|(piece, files)| (WillPiece(piece), files))
    }

    /// Put together again. `None` if the pieces are not a whole.
    pub fn from_pieces(pieces: impl IntoIterator<Item = (WillPiece, Vec<OwnedFd>)>) -> Option<Self> {
        let mut pieces = pieces.into_iter();
        let (WillPiece(Piece::Fleet(record)), _) = pieces.next()? else { return None };
        let mut models: Vec<ModelWill> = Vec::new();
        for (WillPiece(piece), files) in pieces {
            match piece {
                Piece::Fleet(_) => return None,
                Piece::Model(record) => models.push(ModelWill { record: *record, heirs: Vec::new() }),
                Piece::Process(record) => {
                    models.last_mut()?.heirs.push(Heir { record: *record, files });
                }
            }
        }
        Some(Self { record, models })
    }

    /// How many processes there are.
    pub fn processes(&self) -> usize {
        self.models.iter().map(|model| model.heirs.len()).sum()
    }

    pub(super) fn since(&self) -> Since {
        let run = now_of_machine().saturating_sub(self.record.began);
        let now = Instant::now();
        Since {
            epoch: now.checked_sub(run).unwrap_or(now),
            generations: self.record.generations,
            begun: tokio_util::sync::CancellationToken::new(),
        }
    }

    pub(super) fn take(&mut self, model: &str) -> Option<ModelWill> {
        let index = self.models.iter().position(|will| will.record.name == model)?;
        Some(self.models.swap_remove(index))
    }
}

/// What runs of a generation in another instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Count {
    model: String,
    generation: GenerationId,
    in_flight: u32,
    /// More may come.
    #[serde(default)]
    open: bool,
    /// All that was done so far.
    work: Work,
}

/// What was set in processes of a model over there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Touched {
    model: String,
    /// What of it is kept, unless the next instance knows it anyway.
    #[serde(default)]
    settings: Vec<SetElsewhere>,
}

/// What an instance that has let go of its processes still has to do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Remains {
    counts: Vec<Count>,
    /// Callers who wait, by model: whoever starts processes now has to know that somebody needs one.
    #[serde(default)]
    waiting: BTreeMap<String, usize>,
    /// How many have had to wait for those so far: one who comes while another one leaves is not seen otherwise.
    #[serde(default)]
    came: BTreeMap<String, u64>,
    /// Models in whose processes clients have set something, which is to be set in all of them, and in those that follow.
    #[serde(default)]
    touched: Vec<Touched>,
    /// There is an instance before it, which has not ended and tells it, too, what it still has to do.
    #[serde(default)]
    elders: bool,
}

impl Remains {
    /// Whether nothing runs, nobody waits, and neither can happen any more.
    pub fn is_nothing(&self) -> bool {
        !self.elders && self.waiting.is_empty() && self.counts.iter().all(|count| count.in_flight == 0)
    }
}

/// Places in the slots that requests of another instance have. That instance lives for as long as they do.
#[derive(Debug)]
pub struct Shares {
    fleet: Fleet,
    held: HashMap<GenerationId, (Vec<Lease>, Work)>,
    /// The last number of what was set there, by model and route.
    set: HashMap<(String, String), u64>,
    /// Models that were found touched there: what follows after all that was unloaded is as its command made it.
    touched: HashSet<String>,
    /// Models that were told.
    known: Vec<Arc<Handle>>,
}

/// A fleet that decides nothing. Dropped, it goes on as before.
#[derive(Debug)]
#[must_use = "dropped, the fleet decides again"]
pub struct Frozen<'a>(Option<&'a Fleet>);

impl Frozen<'_> {
    /// It comes to the hand-over: the fleet never decides again.
    pub fn stay(mut self) {
        self.0 = None;
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        if let Some(fleet) = self.0 {
            fleet.thaw();
        }
    }
}

impl Fleet {
    /// Models of the other instance whose processes run and that are not configured here: nobody would ever end those.
    pub fn unclaimed(&self) -> Vec<String> {
        let will = lock(&self.inner.will);
        let left = will.iter().flat_map(|will| &will.models).filter(|model| !model.heirs.is_empty());
        left.map(|model| model.record.name.clone()).collect()
    }

    /// Stops deciding, and says what there is. Requests go on. Waits for what is under way, until the deadline. Whoever does not wait for
    /// it leaves all as it was.
    ///
    /// # Errors
    ///
    /// What is still under way then, in words. All goes on as before.
    pub async fn bequeath(&self, deadline: Instant) -> Result<(FleetWill, Frozen<'_>), String> {
        let inner = &self.inner;
        if inner.ending.swap(true, Ordering::SeqCst) {
            return Err("everything ends".to_owned());
        }
        let frozen = Frozen(Some(self));
        let run = inner.context.epoch.elapsed();
        loop {
            let busy = match self.freeze().await {
                Ok(models) => {
                    let began = now_of_machine().saturating_sub(run);
                    let began = began.saturating_sub(inner.context.epoch.elapsed().saturating_sub(run));
                    let generations = inner.context.last_generation().0;
                    let record = FleetRecord { began, generations };
                    return Ok((FleetWill { record, models }, frozen));
                }
                Err(busy) => busy,
            };
            self.send_all(|| Control::Thaw);
            if Instant::now() >= deadline {
                return Err(busy);
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
    }

    async fn freeze(&self) -> Result<Vec<ModelWill>, String> {
        let mut change = self.inner.change.lock().await;
        change.leaving.retain(|handle| !handle.is_gone());
        if !change.canaries.is_empty() {
            return Err("another build is being tried (`llama-warden canary stop`)".to_owned());
        }
        if let Some(leaving) = change.leaving.first() {
            return Err(format!("the model `{}`, which was removed, still ends", leaving.leases.name()));
        }
        let mut wills = Vec::new();
        for handle in self.own() {
            let (reply, answer) = oneshot::channel();
            handle.send(Control::HandOver(reply));
            match answer.await {
                Ok(Ok(will)) => wills.push(will),
                Ok(Err(busy)) => return Err(busy),
                Err(_) => return Err(format!("the model `{}` has ended", handle.leases.name())),
            }
        }
        Ok(wills)
    }

    /// Those of the roster that have processes here.
    fn own(&self) -> Vec<Arc<Handle>> {
        let roster = self.inner.roster.load();
        roster.handles().filter(|handle| !handle.is_remote).cloned().collect()
    }

    fn send_all(&self, control: impl Fn() -> Control) {
        for handle in self.own() {
            handle.sender.send(Message::Control(control()));
        }
    }

    /// It did not come to the hand-over: everything goes on.
    fn thaw(&self) {
        self.send_all(|| Control::Thaw);
        self.inner.ending.store(false, Ordering::SeqCst);
    }

    /// The next instance has the processes from now on. What has a lease here, or waits for one, goes on.
    pub async fn let_go(&self) {
        self.inner.loader_ends.cancel();
        for handle in self.own() {
            let (reply, done) = oneshot::channel();
            handle.send(Control::LetGo(reply));
            // Fails only if its task has ended.
            let _gone = done.await;
        }
    }

    /// After [`Self::let_go`], when nothing runs here any more: ends all tasks. The processes live on.
    pub async fn disband(&self) {
        self.send_all(|| Control::Disband);
        let until = Instant::now();
        for handle in self.inner.roster.load().handles().filter(|handle| handle.is_remote) {
            handle.send(Control::Shutdown(until));
        }
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
    }

    /// After [`Self::let_go`]: nobody new is let in, for whom there is no slot at once.
    pub fn close_queues(&self) {
        let now = Instant::now();
        self.send_all(|| Control::Shutdown(now));
    }

    /// Waits until all processes of the instance before answer. False at the deadline.
    pub async fn has_adopted(&self, deadline: Instant) -> bool {
        let mut views = self.subscribe();
        loop {
            let view = views.borrow_and_update().clone();
            let mut backends = view.models.iter().flat_map(|model| &model.backends);
            if backends.all(|backend| backend.generation.is_none() || backend.phase == Phase::Ready) {
                return true;
            }
            drop(view);
            let changed = tokio::time::timeout_at(deadline, views.changed()).await;
            if !matches!(changed, Ok(Ok(()))) {
                return false;
            }
        }
    }

    /// The instance before us has let go: decisions are ours, and so are its processes.
    pub fn begin(&self) {
        // What is left of it is of no model that there is.
        *lock(&self.inner.will) = None;
        self.inner.context.begun.cancel();
        self.send_all(|| Control::Begin);
    }

    /// What is still to be done here, for the instance that the processes were let go to. What is to be done in the one before us counts, too.
    pub fn remains(&self) -> Remains {
        let of = |handle: Arc<Handle>| {
            let model = handle.leases.name().to_string();
            let count = move |Tally { generation, in_flight, work, open }| Count {
                model: model.clone(),
                generation,
                in_flight,
                open,
                work,
            };
            handle.leases.counts().into_iter().map(count)
        };
        let own = self.own();
        let (mut waiting, mut came) = (BTreeMap::new(), BTreeMap::new());
        for leases in own.iter().map(|handle| &handle.leases) {
            let callers = leases.waiting();
            if callers > 0 {
                waiting.insert(leases.name().to_string(), callers);
                came.insert(leases.name().to_string(), leases.came());
            }
        }
        let touched =
            own.iter().map(|handle| &handle.leases).filter(|leases| !leases.settings.are_untouched());
        let touched = touched
            .map(|leases| Touched { model: leases.name().to_string(), settings: leases.settings.untold() })
            .collect();
        let elders = *self.inner.elders.borrow() > 0;
        Remains { counts: own.into_iter().flat_map(of).collect(), waiting, came, touched, elders }
    }

    /// Waits until no instance before us has anything to do any more.
    pub async fn elders_ended(&self) {
        let mut elders = self.inner.elders.subscribe();
        // Fails only without a sender, which we have.
        drop(elders.wait_for(|elders| *elders == 0).await);
    }

    /// Where requests for models with processes go now, for the instance before us: what it still has may have to be sent again.
    pub fn gates(&self) -> Vec<Gate> {
        let view = self.view();
        let slots = |generation| {
            let mut backends = view.models.iter().flat_map(|model| &model.backends);
            backends.find(|backend| backend.generation == Some(generation)).and_then(|backend| backend.slots)
        };
        let mut gates = Vec::new();
        for handle in self.own() {
            for cell in handle.leases.open_cells() {
                let Some(endpoint) = cell.address.endpoint() else { continue };
                gates.push(Gate {
                    model: handle.leases.name().to_string(),
                    generation: cell.id,
                    endpoint: endpoint.clone(),
                    facts: cell.facts(),
                    slots: slots(cell.id).or_else(|| handle.leases.limit(cell.id)),
                    kin: cell.kin.get().copied(),
                    touched: !handle.leases.settings.are_untouched(),
                });
            }
        }
        gates.sort_by_key(|gate| gate.generation);
        gates
    }

    /// Resolves when a model has followed the gates of the next instance: what [`Self::gates`] says may be another.
    pub async fn followed(&self) {
        self.inner.context.followed.notified().await;
    }

    /// Of which models callers were turned away, a moment ago at most, for the instance before us: who waits there is to hear the same.
    pub fn refusals(&self) -> Vec<Refused> {
        let context = &self.inner.context;
        let of_ours = self.own().into_iter().filter_map(|handle| {
            let denied = handle.leases.refusal_elsewhere()?;
            Refused::now(handle.leases.name().as_str(), &denied)
        });
        // Nobody here will ever do anything for those.
        let roster = self.inner.roster.load();
        let is_ours = |model: &String| {
            roster.get(&ModelName::new(model.as_str())).is_some_and(|handle| !handle.is_remote)
        };
        let awaited = lock(&self.inner.awaited).clone();
        let of_others = awaited.iter().filter(|model| !is_ours(model));
        let of_others = of_others.filter_map(|model| Refused::now(model, &Denied::Removed));
        for refused in of_ours.chain(of_others) {
            context.refused.note(refused);
        }
        context.refused.all()
    }

    /// After [`Fleet::let_go`]: these are the gates of the next instance, and whom it turned away.
    pub fn follow_gates(&self, gates: &[Gate], refusals: &[Refused]) {
        for refused in refusals {
            // For whoever is before us.
            self.inner.context.refused.note(refused.clone());
        }
        for handle in self.own() {
            let name = handle.leases.name().as_str();
            let of = gates.iter().filter(|gate| gate.model == name);
            let refused = refusals.iter().filter(|refused| refused.model == name);
            handle.send(Control::Gates(of.cloned().collect(), refused.cloned().collect()));
        }
    }

    /// Keeps places for what runs in the instance before us.
    pub fn shares(&self) -> Shares {
        self.inner.elders.send_modify(|elders| *elders += 1);
        let (held, set, touched) = (HashMap::new(), HashMap::new(), HashSet::new());
        Shares { fleet: self.clone(), held, set, touched, known: Vec::new() }
    }
}

impl Shares {
    /// So much is to be done there now.
    pub fn update(&mut self, remains: &Remains) {
        // One that left the roster may have its process still, and be told of there.
        self.known.retain(|handle| !handle.is_gone());
        for handle in self.fleet.own() {
            if !self.known.iter().any(|known| Arc::ptr_eq(known, &handle)) {
                self.known.push(handle);
            }
        }
        for count in &remains.counts {
            let (leases, done) =
                self.held.entry(count.generation).or_insert_with(|| (Vec::new(), count.work));
            let wanted = usize::try_from(count.in_flight).unwrap_or(usize::MAX);
            leases.truncate(wanted);
            let has = |handle: &&Arc<Handle>| handle.leases.work(count.generation).is_some();
            let Some(handle) = self.known.iter().find(has) else { continue };
            handle.leases.add_work(count.generation, count.work - *done);
            *done = count.work;
            while leases.len() < wanted {
                let Some(lease) = handle.leases.take_for_another(count.generation) else { break };
                leases.push(lease);
            }
        }
        for Touched { model, settings } in &remains.touched {
            let roster = self.fleet.inner.roster.load();
            let own = roster.get(&ModelName::new(model.as_str())).filter(|handle| !handle.is_remote);
            let Some(leases) = own.map(|handle| &handle.leases) else { continue };
            if self.touched.insert(model.clone()) {
                leases.settings.touch();
            }
            for SetElsewhere { generation, number, path, body } in settings {
                // Once, however often this is said: a client may set something else here. Whoever does so in the moment in which this is on
                // its way is overtaken by it.
                let last = self.set.entry((model.clone(), path.clone())).or_default();
                if number > last {
                    *last = *number;
                    match body.clone() {
                        Some(body) => leases.note_setting(*generation, path, Bytes::from(body)),
                        None => leases.lose_setting(*generation, path),
                    }
                }
            }
        }
        self.held.retain(|generation, _| remains.counts.iter().any(|count| count.generation == *generation));
        // Last: a process that drains waits for what was just counted.
        let roster = self.fleet.inner.roster.load();
        for handle in &self.known {
            let name = handle.leases.name();
            let is_ours = roster.get(name).is_some_and(|own| Arc::ptr_eq(own, handle));
            let waiting = remains.waiting.get(name.as_str()).copied().filter(|_| is_ours);
            let came = remains.came.get(name.as_str()).copied().filter(|_| is_ours);
            let open = remains.counts.iter().filter(|count| count.open).map(|count| count.generation);
            let (waiting, came) = (waiting.unwrap_or_default(), came.unwrap_or_default());
            handle.leases.set_elsewhere(Elsewhere::new(waiting, came, open.collect()));
        }
        *lock(&self.fleet.inner.awaited) = remains.waiting.keys().cloned().collect();
    }

    /// How many places are kept.
    pub fn held(&self) -> usize {
        self.held.values().map(|(leases, _)| leases.len()).sum()
    }
}

impl Drop for Shares {
    fn drop(&mut self) {
        self.update(&Remains::default());
        self.fleet.inner.elders.send_modify(|elders| *elders = elders.saturating_sub(1));
    }
}
