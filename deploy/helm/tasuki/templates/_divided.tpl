{{- /* A pool whose workers have several hosts: a StatefulSet for each host number. Worker N is the
pods with ordinal N of all of them. Arguments: root; name, values (`pool`) and `full` name. */ -}}
{{- define "tasuki.dividedPool" -}}
{{- $root := .root -}}
{{- $name := .name -}}
{{- $pool := .pool -}}
{{- $full := .full -}}
{{- if not $pool.nodesKey.secretName }}
{{- fail (printf "pools.%s has %d hosts for each worker: give nodesKey.secretName a Secret with their key (kubectl create secret generic NAME --from-literal=key=$(openssl rand -hex 32))" $name (int $pool.hosts)) }}
{{- end }}
{{- if $pool.autoscaling.enabled }}
{{- fail (printf "pools.%s has %d hosts for each worker, which KEDA does not scale together: set autoscaling.enabled to false" $name (int $pool.hosts)) }}
{{- end }}
{{- include "tasuki.checkDividedNames" . }}
---
# Names of the pods, by which the hosts of a worker find the first one before any is ready.
apiVersion: v1
kind: Service
metadata:
  name: {{ $full }}-hosts
  labels:
    {{- include "tasuki.labels" $root | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "tasuki.selector" $root | nindent 4 }}
    tasuki.dev/pool: {{ $name | quote }}
  ports:
    - {name: hosts, port: 7100, targetPort: 7100}
{{- range $host := until (int $pool.hosts) }}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $full }}{{ if $host }}-host{{ $host }}{{ end }}
  labels:
    {{- include "tasuki.labels" $root | nindent 4 }}
    tasuki.dev/component: {{ if $host }}worker-host{{ else }}worker{{ end }}
    tasuki.dev/pool: {{ $name | quote }}
spec:
  replicas: {{ $pool.replicas }}
  revisionHistoryLimit: 3
  serviceName: {{ $full }}-hosts
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "tasuki.selector" $root | nindent 6 }}
      tasuki.dev/pool: {{ $name | quote }}
      tasuki.dev/host: {{ $host | quote }}
  template:
    {{- include "tasuki.workerTemplate" (dict "root" $root "name" $name "pool" $pool "full" $full "host" $host) | nindent 4 }}
{{- end }}
{{- end -}}
