//! Promise: if the kernel allows control groups, all processes of a wrapper end with its server, even if they
//! leave its process group, session and environment. The next start ends what a killed llama-warden left.

use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::json;
use warden_rig::control_group::{GroupRights, OuterGroup};
use warden_rig::process::ProcessId;
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Outcome, Trouble, binaries, wait_until};

use crate::wrappers::{MIB, TWICE, Wrapped, start_as, until_measured_and_stopped};

/// A daemon with another environment, next to a server that stays: only a control group shows whose it is.
const BESIDE: &str = "\
(setsid env -i FAKE_LLAMA_SCRIPT=\"$FAKE_LLAMA_SCRIPT\" \"$fake\" -m \"$2\" --host \"$HOME/beside-$$.sock\" &)
 exec \"$fake\" \"$@\"";
const SIZE: u64 = 64;

/// A home, a control group, and the program that runs in it.
struct Ground {
    group: OuterGroup,
    setup: Setup,
    program: PathBuf,
}

impl Ground {
    fn new(rights: GroupRights) -> Result<Option<Self>, Trouble> {
        let setup = Setup::new()?;
        let Some(group) = OuterGroup::new()? else { return Ok(None) };
        let program = group.program(&setup.home, rights)?;
        Ok(Some(Self { group, setup, program }))
    }
}

fn script() -> serde_json::Value {
    json!({"base_mib": SIZE})
}

async fn kill(wrapped: &mut Wrapped) -> Outcome {
    wrapped.warden.kid.signal(Signal::KILL);
    assert_eq!(wrapped.warden.kid.exit(SOON).await?, -9);
    Ok(())
}

async fn start_again(wrapped: &mut Wrapped, program: &Path) -> Outcome {
    let file = wrapped.warden.home().path().join("warden.toml");
    wrapped.warden.start_anew(program, &["serve".into(), "--config".into(), file.into()]).await
}

async fn until_two(wrapped: &Wrapped) -> Result<[ProcessId; 2], Trouble> {
    wait_until("two servers run", SOON, async || wrapped.servers.all().len() == 2).await?;
    let all = wrapped.servers.all();
    let is_beside =
        |one: &&ProcessId| one.socket().is_some_and(|path| path.to_string_lossy().contains("/beside-"));
    let beside = all.iter().find(is_beside).copied();
    let other = all.iter().find(|one| !is_beside(one)).copied();
    other.zip(beside).map(Into::into).ok_or_else(|| Trouble::new("one of them has ended".to_owned()))
}

#[tokio::test]
async fn a_daemon_of_a_killed_instance_ends_at_the_next_start_and_a_living_one_keeps_its_own() -> Outcome {
    let Some(Ground { group, setup, program }) = Ground::new(GroupRights::Write)? else { return Ok(()) };
    let living = start_as(&program, Setup::new()?, TWICE, &script(), "").await?;
    let others = living.until_ready(None).await?;
    let mut wrapped = start_as(&program, setup, TWICE, &script(), "").await?;
    let old = wrapped.until_ready(None).await?;
    kill(&mut wrapped).await?;
    assert!(old.is_alive(), "the kernel ends only who we forked");
    start_again(&mut wrapped, &program).await?;
    wrapped.warden.says("processes of a llama-warden that was killed were still running").await?;
    wrapped.until_ready(Some(old)).await?;
    assert!(!old.is_alive());
    assert!(
        !wrapped.warden.kid.output().contains(&format!("{}", others.pid)),
        "{}",
        wrapped.warden.kid.output()
    );
    living.serves("living").await?;
    assert_eq!(living.servers.all(), [others]);
    for mut one in [wrapped, living] {
        assert_eq!(one.warden.terminate(SOON).await?, 0);
        one.servers.until_none().await?;
    }
    assert_eq!(group.inner()?, [""; 0]);
    Ok(())
}

#[tokio::test]
async fn what_hides_in_another_session_and_environment_is_measured_and_ends_with_its_server() -> Outcome {
    let Some(Ground { group, setup, program }) = Ground::new(GroupRights::Write)? else { return Ok(()) };
    let mut wrapped = start_as(&program, setup, BESIDE, &script(), "").await?;
    let old = until_two(&wrapped).await?;
    wrapped.until_measured(2 * SIZE * MIB).await?;
    wrapped.warden.restart("m", 1).await?;
    wait_until("both are gone", SOON, async || !old.iter().any(|one| one.is_alive())).await?;
    let new = until_two(&wrapped).await?;
    wrapped.until_measured(2 * SIZE * MIB).await?;
    wait_until("the group of the old ones is gone", SOON, async || {
        group.inner().is_ok_and(|groups| groups.len() == 1)
    })
    .await?;
    new[0].signal(Signal::KILL);
    wait_until("both are gone", SOON, async || !new.iter().any(|one| one.is_alive())).await?;
    until_two(&wrapped).await?;
    assert_eq!(wrapped.warden.terminate(SOON).await?, 0);
    assert!(wrapped.servers.all().is_empty());
    assert_eq!(group.inner()?, [""; 0]);
    Ok(())
}

#[tokio::test]
async fn groups_go_along_to_the_next_program_and_are_found_when_that_is_killed() -> Outcome {
    let Some(Ground { group, setup, program }) = Ground::new(GroupRights::Write)? else { return Ok(()) };
    let mut wrapped = start_as(&program, setup, BESIDE, &script(), "").await?;
    let old = until_two(&wrapped).await?;
    let next = binaries::llama_warden()?;
    let ran = wrapped.warden.cli(&["upgrade", "--to", &next.to_string_lossy()]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    wrapped.serves("upgraded").await?;
    wrapped.until_measured(2 * SIZE * MIB).await?;
    assert_eq!(until_two(&wrapped).await?, old);
    wrapped.warden.restart("m", 1).await?;
    wait_until("both are gone", SOON, async || !old.iter().any(|one| one.is_alive())).await?;
    let new = until_two(&wrapped).await?;
    wrapped.until_measured(2 * SIZE * MIB).await?;
    kill(&mut wrapped).await?;
    start_again(&mut wrapped, &program).await?;
    wait_until("both are gone", SOON, async || !new.iter().any(|one| one.is_alive())).await?;
    until_two(&wrapped).await?;
    assert_eq!(wrapped.warden.terminate(SOON).await?, 0);
    assert_eq!(group.inner()?, [""; 0]);
    Ok(())
}

#[tokio::test]
async fn without_the_right_to_make_groups_everything_is_as_without_them() -> Outcome {
    let Some(Ground { group, setup, program }) = Ground::new(GroupRights::Read)? else { return Ok(()) };
    let wrapped = start_as(&program, setup, TWICE, &script(), "").await?;
    wrapped.until_ready(None).await?;
    assert_eq!(group.inner()?, [""; 0]);
    assert!(!wrapped.warden.kid.output().contains("control group"), "{}", wrapped.warden.kid.output());
    let server = wrapped.servers.all();
    wrapped.warden.restart("m", 1).await?;
    wait_until("it is replaced", SOON, async || !server.iter().any(|one| one.is_alive())).await?;
    until_measured_and_stopped(wrapped).await
}
