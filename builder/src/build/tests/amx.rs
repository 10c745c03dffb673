//! Plans on a machine whose compiler reports a processor with AMX.

use super::*;
use crate::build::amx;
use crate::plan::AmxKernels;

/// A machine with the real C++ compiler and a modified `_tile_loadconfig`, which declares that it reads
/// `bytes` bytes.
fn rig(bytes: usize) -> Rig {
    let header = format!(
        "#include <immintrin.h>\n\
         #define _tile_loadconfig(from) __asm__ volatile(\"ldtilecfg %0\" :: \"m\"(*(const char(*)[{bytes}])(from)))"
    );
    let script = "case \"$*\" in\n\
                  *--version*) echo c++ 12;;\n\
                  *-dumpmachine*) echo x86_64-linux-gnu;;\n\
                  *-march=native*-dM*) echo '#define __AMX_INT8__ 1';;\n\
                  *-dM*) ;;\n\
                  *probe.cpp*) exec /usr/bin/c++ -include \"$(dirname \"$0\")/other.h\" \"$@\";;\n\
                  *) exec /usr/bin/c++ \"$@\";;\n\
                  esac";
    let mut rig = Rig::new(&[("c++", script)]);
    fs::write(rig.folder.path().join("bin/other.h"), header).unwrap();
    rig.request.arch = CpuTarget::Native.into();
    rig
}

#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn a_compiler_that_drops_the_tile_configuration_builds_without_amx_and_the_plan_says_so() {
    let rig = rig(8);
    let plan = rig.builder.plan(&rig.request).await.unwrap();
    let Some(AmxKernels::LeftOut(why)) = &plan.amx else { unreachable!("{:?}", plan.amx) };
    assert!(why.starts_with("c++ 12 drops a part of the tile configuration"), "{why}");
    assert_eq!(crate::plan::option_value(&plan.recipe.cmake, "GGML_AMX_INT8"), Some("OFF"));

    // Another check would fail to compile, and a failed check leaves the kernels in.
    fs::remove_file(rig.folder.path().join("bin/other.h")).unwrap();
    let again = rig.builder.plan(&rig.request).await.unwrap();
    assert_eq!(again.amx, plan.amx, "the result is remembered");
}

#[cfg(target_arch = "x86_64")]
#[tokio::test]
async fn a_compiler_that_keeps_it_builds_with_amx_until_a_build_was_seen_to_fail_or_an_option_says_no() {
    let mut rig = rig(64);
    let plan = rig.builder.plan(&rig.request).await.unwrap();
    assert_eq!(plan.amx, Some(AmxKernels::Compiled));

    rig.request.options = vec!["GGML_AMX_INT8=OFF".to_owned()];
    let asked = rig.builder.plan(&rig.request).await.unwrap();
    assert!(matches!(asked.amx, Some(AmxKernels::LeftOut(_))));
    rig.request.options.clear();

    amx::remember_crash(&rig.builder.dirs.cache, &plan.compilers, &plan.source.identity, "it died").unwrap();
    let after = rig.builder.plan(&rig.request).await.unwrap();
    assert_eq!(after.amx, Some(AmxKernels::LeftOut("it died".to_owned())));
    assert_ne!(after.id, plan.id);

    // A portable build has no AMX kernels.
    rig.request.arch = CpuTarget::Portable.into();
    assert_eq!(rig.builder.plan(&rig.request).await.unwrap().amx, None);
}
