//! The process of a diagnosis: made by whoever makes all processes, so that it dies with us however we die; read as it speaks; ended when
//! something is in the way.

use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{Exit, SpawnRequest};

use super::told::Pipe;
use super::{Diagnoses, look, spare, words};
use crate::admin::answer::Admin;
use crate::sync::lock;

/// When memory runs out the kernel takes it before anything that serves.
pub(super) const FIRST_TO_GO: i32 = 500;
/// How often it is looked whether a model needs its memory.
const LOOK: Duration = Duration::from_secs(1);

/// The reason to end a diagnosis before it is through.
enum Cut {
    Asked,
    Late,
    Over,
    Room(String),
}

impl Diagnoses {
    /// Runs it to its end. Whether it came to a finding, and what that is.
    pub(super) async fn run(
        &self,
        admin: &Admin,
        nursery: NurseryHandle,
        request: SpawnRequest,
        end: &CancellationToken,
    ) -> (bool, String) {
        let child = match nursery.spawn(request).await {
            Ok(child) => child,
            Err(error) => return (false, error.to_string()),
        };
        let reading = async {
            if let Some((out, told)) = child.take_output() {
                tokio::join!(self.hear(Pipe::Out, out), self.hear(Pipe::Error, told));
            }
            child.wait().await
        };
        tokio::pin!(reading);
        let late = Instant::now() + self.inner.numbers.limit;
        let cut = tokio::select! {
            exit = &mut reading => return self.found(exit),
            () = end.cancelled() => Cut::Asked,
            () = self.inner.over.cancelled() => Cut::Over,
            () = sleep_until(late) => Cut::Late,
            why = pressed(admin) => Cut::Room(why),
        };
        match cut {
            Cut::Asked => {}
            Cut::Late => self.ends("its time was over"),
            Cut::Over => self.ends("this program ended, or another one took its place"),
            Cut::Room(why) => self.ends(&why),
        }
        child.terminate();
        if let Ok(exit) = timeout(self.inner.numbers.grace, &mut reading).await {
            self.found(exit)
        } else {
            child.kill();
            (false, "it did not end when it was told to, and was killed".to_owned())
        }
    }

    fn found(&self, exit: Exit) -> (bool, String) {
        let state = lock(&self.inner.state);
        words::outcome(exit, state.now.as_ref().and_then(|now| now.told.last()))
    }

    /// Keeps what it says.
    async fn hear(&self, from: Pipe, mut pipe: pipe::Receiver) {
        let mut buffer = vec![0; 4096];
        while let Ok(read @ 1..) = pipe.read(&mut buffer).await {
            if let Some(now) = &mut lock(&self.inner.state).now {
                now.told.take(from, &buffer[..read]);
            }
        }
    }
}

/// Resolves when a model needs the memory, with why.
async fn pressed(admin: &Admin) -> String {
    let mut ticks = interval(LOOK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = look::facts(admin);
    loop {
        ticks.tick().await;
        let now = look::facts(admin);
        if let Some(why) = spare::must_end(&before, &now) {
            return why;
        }
        before = now;
    }
}
